"""Our routes about the policy and its tenants, under ``/ext/v1``.

``usage`` answers a tenant about itself; everything else needs the admin key. The authentication
middleware decides who gets here.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import (
    APIRouter,
    Depends,
    FastAPI,
    Header,
    HTTPException,
    Path,
    Query,
    Request,
    Response,
)
from pydantic import BaseModel, Field

from sglang_ext import active
from sglang_ext.audit_log import AuditLog, Refusal, Refused, who
from sglang_ext.errors import PolicyError, SglangExtError
from sglang_ext.leavers import Leaving, Requests
from sglang_ext.live_policy import Ask, Edit, Edited, LivePolicy, UnknownTenantError, VersionError
from sglang_ext.tenancy.document import masked, read_json, version_of
from sglang_ext.tenancy.identity import current_identity
from sglang_ext.tenancy.loader import MAX_BYTES, policy_text
from sglang_ext.tenancy.yaml_text import read_yaml

__all__ = ["mount", "router"]

router = APIRouter(
    prefix="/ext/v1",
    tags=["sglang_ext"],
    responses={
        400: {
            "model": Refused,
            "description": "Refused, with the field, its value and the reason.",
        }
    },
)

_LONGEST_WAIT_S = 300


def mount(app: FastAPI, live: LivePolicy, log: AuditLog, ask: Ask) -> None:
    """Add the routes, and what they and our other routes need, to SGLang's application."""
    app.state.live_policy = live
    app.state.audit_log = log
    app.state.ask_schedulers = ask
    app.include_router(router)


class PolicyInForce(BaseModel):
    """The policy as its file says it, keys cut to their fingerprints."""

    version: str
    policy: dict[str, Any]


class TenantInForce(BaseModel):
    """A tenant's section of the policy file, keys cut to their fingerprints."""

    version: str
    tenant: dict[str, Any]


class FieldChange(BaseModel):
    """A field that was added, removed or changed; keys and prompts show no value."""

    path: str
    change: str
    old: Any = None
    new: Any = None


class RemovedPages(BaseModel):
    """What left each tier, and what is still there because requests or copies hold it."""

    freed: dict[str, int]
    left: dict[str, int]


class Removed(BaseModel):
    """What belonged to who is no longer in the policy."""

    aborted_requests: dict[str, int] = Field(description="By tenant that is gone.")
    owners: dict[str, RemovedPages] = Field(description="By owner of pages that is gone.")


class Applied(BaseModel):
    """A change that is in force in every process."""

    version: str
    changes: list[FieldChange]
    saved: bool = Field(
        description="Whether the policy file holds it, so that it outlives a restart."
    )
    not_saved_because: str | None
    refused_requests: int = Field(description="Waiting requests that the new limits never admit.")
    removed: Removed


class TierUsage(BaseModel):
    """Tokens of all replicas together; no quota: the whole tier."""

    held_tokens: int
    quota_tokens: int | None
    hard: bool
    reserve_tokens: int


class TenantUsage(BaseModel):
    """What a tenant, or its sharing group, holds and may hold."""

    owner: str
    sessions: int
    tiers: dict[str, TierUsage]


class Usage(BaseModel):
    """By tenant."""

    tenants: dict[str, TenantUsage]


_REFUSALS: dict[int | str, dict[str, Any]] = {
    404: {"model": Refusal, "description": "No such tenant."},
    412: {"model": Refusal, "description": "Another version is in force."},
    413: {"model": Refusal, "description": "Too large."},
}
_BODY = {
    "required": True,
    "content": {
        "application/json": {"schema": {"type": "object"}},
        "application/yaml": {"schema": {"type": "object"}},
    },
}

IfMatch = Annotated[
    str | None, Header(description="Change only the policy of this version (ETag of GET).")
]
Name = Annotated[str, Path(description="The tenant's name in the policy.", max_length=64)]


def _leaving(
    requests: Annotated[
        Requests, Query(description="What becomes of requests of a tenant that is gone.")
    ] = Requests.FINISH,
    timeout: Annotated[
        float, Query(ge=0, le=_LONGEST_WAIT_S, description="Seconds that they may take to finish.")
    ] = Leaving.seconds,
) -> Leaving:
    return Leaving(requests, timeout)


def _live(request: Request) -> LivePolicy:
    live: LivePolicy = request.app.state.live_policy
    return live


Live = Annotated[LivePolicy, Depends(_live)]
Leaves = Annotated[Leaving, Depends(_leaving)]


@router.get("/policy")
async def get_policy(response: Response) -> PolicyInForce:
    """Return the policy in force."""
    document = active.policy().document
    return PolicyInForce(version=_tag(response, document), policy=masked(document))


@router.put("/policy", responses=_REFUSALS, openapi_extra={"requestBody": _BODY})
async def put_policy(
    request: Request, live: Live, leaving: Leaves, if_match: IfMatch = None
) -> Applied:
    """Put another policy in force, given as YAML or JSON, without dropping a request."""
    text = await _text(request)
    is_json = _is_json(request)

    def edit(_: Mapping[str, Any]) -> Edited:
        edited = Edited(read_json(text)) if is_json else Edited(read_yaml(text), text)
        _keep_a_way_back(edited.document)
        return edited

    return await _change(live, edit, leaving, if_match)


@router.get("/tenants/{tenant}", responses={404: _REFUSALS[404]})
async def get_tenant(tenant: Name, response: Response) -> TenantInForce:
    """Return what the policy in force says of one tenant."""
    document = active.policy().document
    own = masked(_found(document, tenant))
    return TenantInForce(version=_tag(response, document), tenant=own)


@router.put("/tenants/{tenant}", responses=_REFUSALS)
async def put_tenant(
    tenant: Name, body: dict[str, Any], live: Live, leaving: Leaves, if_match: IfMatch = None
) -> Applied:
    """Add a tenant, or replace what is said of it; without ``api_keys`` it keeps its keys."""

    def edit(document: Mapping[str, Any]) -> Edited:
        tenants = document.get("tenants", {})
        keys = tenants.get(tenant, {}).get("api_keys")
        own = body if keys is None else {"api_keys": keys, **body}
        return Edited({**document, "tenants": {**tenants, tenant: own}})

    return await _change(live, edit, leaving, if_match)


@router.delete("/tenants/{tenant}", responses=_REFUSALS)
async def delete_tenant(
    tenant: Name, live: Live, leaving: Leaves, if_match: IfMatch = None
) -> Applied:
    """Remove a tenant: its keys at once, its requests as asked, its pages from every tier."""

    def edit(document: Mapping[str, Any]) -> Edited:
        _of(document, tenant)
        tenants = {name: own for name, own in document["tenants"].items() if name != tenant}
        return Edited({**document, "tenants": tenants})

    return await _change(live, edit, leaving, if_match)


@router.get("/usage")
async def usage(request: Request) -> Usage:
    """Return what the caller holds and may hold in each tier; for the admin key, everybody."""
    identity = current_identity.get()
    names = [identity.tenant] if identity.id_prefix else list(active.policy().tenants)
    ask: Ask = request.app.state.ask_schedulers
    ranks = [answer["tenants"] for answer in await ask("usage", {"tenants": names})]
    found: set[str] = set.intersection(*(set(rank) for rank in ranks))
    return Usage(
        tenants={name: _together([rank[name] for rank in ranks]) for name in sorted(found)}
    )


async def _change(live: LivePolicy, edit: Edit, leaving: Leaving, if_match: str | None) -> Applied:
    version = None if if_match is None else if_match.strip().removeprefix("W/").strip('"')
    by = who(current_identity.get())
    try:
        answer = await live.change(edit, by, if_match=version, leaving=leaving)
    except SglangExtError as error:
        raise HTTPException(_status(error), str(error)) from error
    return Applied.model_validate(answer)


def _tag(response: Response, document: Mapping[str, Any]) -> str:
    version = version_of(document)
    response.headers["ETag"] = f'"{version}"'
    return version


def _status(error: SglangExtError) -> int:
    if isinstance(error, VersionError):
        return 412
    return 404 if isinstance(error, UnknownTenantError) else 400


def _keep_a_way_back(document: Any) -> None:
    if isinstance(document, dict) and not document.get("admin_keys"):
        problem = "none, expected one: without it nothing could be changed over HTTP any more"
        raise PolicyError("admin_keys", f"{problem}; to do that, edit the file and send SIGHUP")


def _of(document: Mapping[str, Any], tenant: str) -> dict[str, Any]:
    own: dict[str, Any] | None = document.get("tenants", {}).get(tenant)
    if own is None:
        raise UnknownTenantError(f"tenants.{tenant}: no such tenant")
    return own


def _found(document: Mapping[str, Any], tenant: str) -> dict[str, Any]:
    try:
        return _of(document, tenant)
    except UnknownTenantError as error:
        raise HTTPException(404, str(error)) from error


def _is_json(request: Request) -> bool:
    return "json" in request.headers.get("content-type", "").partition(";")[0].lower()


async def _text(request: Request) -> str:
    """Read the body, no more of it than a policy file may have."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BYTES:
            raise HTTPException(413, f"too large, expected at most {MAX_BYTES} bytes")
    try:
        return policy_text(bytes(data))
    except PolicyError as error:
        raise HTTPException(400, str(error)) from error


def _together(ranks: list[dict[str, Any]]) -> TenantUsage:
    """Add up what the replicas answered."""
    tiers = {
        tier: TierUsage(
            held_tokens=sum(rank["tiers"][tier]["held_tokens"] for rank in ranks),
            quota_tokens=_sum_or_none([rank["tiers"][tier]["quota_tokens"] for rank in ranks]),
            hard=first["hard"],
            reserve_tokens=sum(rank["tiers"][tier]["reserve_tokens"] for rank in ranks),
        )
        for tier, first in ranks[0]["tiers"].items()
    }
    sessions = sum(rank["sessions"] for rank in ranks)
    return TenantUsage(owner=ranks[0]["owner"], sessions=sessions, tiers=tiers)


def _sum_or_none(numbers: list[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None

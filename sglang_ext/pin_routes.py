"""Our routes about pinned prefixes, under ``/ext/v1/pins``: text that stays in GPU memory.

A tenant's key pins within its own quota; the admin key names a tenant.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Request
from pydantic import BaseModel, ConfigDict, Field

from sglang_ext.audit_log import audited
from sglang_ext.callers import REFUSALS, Caller, ask
from sglang_ext.patches.admin_channel import tokenize
from sglang_ext.tenancy.identity import Identity
from sglang_ext.tenancy.units import parse_duration

__all__ = ["router"]

router = APIRouter(
    prefix="/ext/v1/pins",
    tags=["sglang_ext"],
    dependencies=[Depends(audited)],
    responses=REFUSALS,
)

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


class Prefix(BaseModel):
    """What is to stay. It has to be cached already: send it once as a prompt."""

    model_config = ConfigDict(extra="forbid")

    prefix: str | list[TokenId] = Field(description="Text as of a completion, or its token ids.")
    ttl: str | None = Field(None, description="How long, such as `1h`; without it, until undone.")
    cache_salt: str | None = None
    extra_key: str = ""


class Replica(BaseModel):
    """Tokens on one replica; no quota: the whole tier."""

    all_pinned_tokens: int
    quota_tokens: int | None


class Pinned(Replica):
    """How many leading tokens are pinned now, of how many that are cached."""

    pinned_tokens: int
    cached_tokens: int
    note: str | None = None


class Pins(BaseModel):
    """What a tenant has pinned."""

    tenant: str
    replicas: list[Replica]


class PinAnswer(BaseModel):
    """What a new pin holds."""

    tenant: str
    replicas: list[Pinned]


class Unpinned(BaseModel):
    """How many pins were undone."""

    tenant: str
    removed: int


@router.post("")
async def pin(body: Prefix, caller: Caller, request: Request) -> PinAnswer:
    """Keep what is cached of a prefix in GPU memory, within the tenant's quota."""
    tokens = await tokenize(body.prefix) if isinstance(body.prefix, str) else body.prefix
    fields: dict[str, Any] = {"prefix": tokens, "extra_key": body.extra_key}
    if body.cache_salt is not None:
        fields["cache_salt"] = body.cache_salt
    ranks = await _ask("pin", caller, {**fields, "milliseconds": _milliseconds(body.ttl)})
    replicas = [_pinned(rank) for rank in ranks]
    request.state.audit = {"of": caller.tenant, "tokens": [one.pinned_tokens for one in replicas]}
    return PinAnswer(tenant=caller.tenant, replicas=replicas)


@router.get("")
async def pins(caller: Caller) -> Pins:
    """Say how much a tenant, or its sharing group, has pinned."""
    ranks = await _ask("pins", caller, {})
    return Pins(tenant=caller.tenant, replicas=[Replica(**_all(rank)) for rank in ranks])


@router.delete("")
async def unpin(caller: Caller, request: Request) -> Unpinned:
    """Undo all pins of a tenant, or of its sharing group; the pages then age as all others."""
    removed = sum(rank["removed"] for rank in await _ask("unpin", caller, {}))
    request.state.audit = {"of": caller.tenant, "removed": removed}
    return Unpinned(tenant=caller.tenant, removed=removed)


def _milliseconds(ttl: str | None) -> int | None:
    try:
        return None if ttl is None else round(parse_duration(ttl) * 1000)
    except ValueError as error:
        raise HTTPException(400, f"ttl: found {ttl!r}, expected {error}") from error


def _all(rank: dict[str, Any]) -> dict[str, Any]:
    return {"all_pinned_tokens": rank["all_pinned"], "quota_tokens": rank["quota"]}


def _pinned(rank: dict[str, Any]) -> Pinned:
    pinned, cached, note = rank["pinned"], rank["cached"], None
    if cached == 0:
        note = "nothing of it is cached: send it once as a prompt, then pin it"
    elif pinned < cached:
        note = (
            f"only {pinned} of {cached} tokens fit what the tenant may pin; undo other pins with "
            "DELETE /ext/v1/pins, or raise its quota.hbm"
        )
    return Pinned(pinned_tokens=pinned, cached_tokens=cached, note=note, **_all(rank))


async def _ask(name: str, caller: Identity, body: dict[str, Any]) -> list[dict[str, Any]]:
    return await ask(name, {"tenant": caller.tenant, **body})

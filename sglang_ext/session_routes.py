"""Our routes about conversations, under ``/ext/v1/sessions``.

A tenant's key acts on its own sessions, the admin key on those of the tenant that it names. The
session of another tenant is answered exactly like one that does not exist.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Path, Query, Request
from pydantic import BaseModel, Field

from sglang_ext.audit_log import audited
from sglang_ext.callers import REFUSALS, Caller, ask
from sglang_ext.patches.admin_channel import replay
from sglang_ext.request_tag import RequestTag, check_session_name
from sglang_ext.tenancy.identity import Identity
from sglang_ext.types import Tier

__all__ = ["router"]

_WAIT_S = 2.0
_AGAIN_S = 0.05

router = APIRouter(
    prefix="/ext/v1/sessions",
    tags=["sglang_ext"],
    dependencies=[Depends(audited)],
    responses=REFUSALS,
)


class Freed(BaseModel):
    """What left each tier, all replicas and ranks together."""

    hbm_tokens: int
    hbm_bytes: int
    cpu_tokens: int
    cpu_bytes: int
    nvme_bytes: int


class InUse(BaseModel):
    """What stayed, because a request, a pin or a copy on its way holds it."""

    hbm_tokens: int
    cpu_tokens: int


class Moved(BaseModel):
    """What a session gave up."""

    session: str
    freed: Freed
    in_use: InUse
    note: str | None = None


class Resumed(BaseModel):
    """Where the tokens were that came up, and how many had to be computed (a page at most)."""

    session: str
    hbm_tokens: int
    cpu_tokens: int
    nvme_tokens: int
    computed_tokens: int
    note: str | None = None


class SessionRow(BaseModel):
    """A session, and the tokens that no other session and no other text needs, by tier."""

    session: str
    hbm_tokens: int
    cpu_tokens: int
    nvme_tokens: int
    idle_seconds: float


class SessionPage(BaseModel):
    """A page of a tenant's sessions, the most recently used first."""

    tenant: str
    total: int
    sessions: list[SessionRow]


def _name(session: Annotated[str, Path(description="The client's X-Session-Id.")]) -> str:
    try:
        return check_session_name(session)
    except ValueError as error:
        raise HTTPException(400, f"session: {error}") from error


Name = Annotated[str, Depends(_name)]


@router.get("")
async def sessions(
    caller: Caller,
    page: Annotated[int, Query(ge=0, le=10**6)] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> SessionPage:
    """List a tenant's sessions, with the tokens that only they use."""
    body = {"tenant": caller.tenant, "page": page, "limit": limit}
    ranks = await ask("session_list", body)
    rows = [SessionRow(**row) for rank in ranks for row in rank["sessions"]]
    total = sum(rank["total"] for rank in ranks)
    return SessionPage(tenant=caller.tenant, total=total, sessions=rows)


@router.post("/{session}/close")
@router.delete("/{session}")
async def close(session: Name, caller: Caller, request: Request) -> Moved:
    """Free what only this session uses, in every tier, and forget the session."""
    return await _moved("session_close", session, caller, request, {})


class Destination(BaseModel):
    """How far down a paused session goes."""

    to: Annotated[Tier, Field(description="`cpu`, or `nvme` to free host memory too.")] = Tier.CPU


@router.post("/{session}/pause")
async def pause(
    session: Name, caller: Caller, request: Request, body: Destination | None = None
) -> Moved:
    """Move what only this session uses down now, and free its GPU memory."""
    to = (body or Destination()).to
    if to not in (Tier.CPU, Tier.NVME):
        raise HTTPException(400, f"to: {to.value!r}, expected cpu or nvme")
    return await _moved("session_pause", session, caller, request, {"to": to})


@router.post("/{session}/resume")
async def resume(session: Name, caller: Caller) -> Resumed:
    """Bring the session's last text up into GPU memory, as a request of the tenant would.

    It is queued and limited like one. Only what some tier holds comes back; nothing is computed
    but the page at its end.
    """
    ranks = await _known("session_text", session, caller, {})
    texts = [rank["text"] for rank in ranks if rank["text"] is not None]
    if not texts:
        return _resumed(session, {}, "no tier holds anything of it any more")
    text = max(texts, key=lambda text: len(text["token_ids"]))
    identity = Identity(caller.tenant, caller.owner, tag=RequestTag(session))
    try:
        where = await replay(text["token_ids"], text["client_key"], text["cache_salt"], identity)
    except ValueError as error:
        raise HTTPException(400, str(error)) from error
    return _resumed(session, where)


def _resumed(session: str, where: Mapping[str, int], note: str | None = None) -> Resumed:
    return Resumed(
        session=session,
        hbm_tokens=where.get("hbm_tokens", 0),
        cpu_tokens=where.get("cpu_tokens", 0),
        nvme_tokens=where.get("nvme_tokens", 0),
        computed_tokens=where.get("computed_tokens", 0),
        note=note,
    )


async def _moved(
    name: str, session: str, caller: Identity, request: Request, body: Mapping[str, Any]
) -> Moved:
    """Ask until nothing waits for a copy on its way any more, but not for long."""
    end = time.monotonic() + _WAIT_S
    freed: Counter[str] = Counter()
    while True:
        ranks = await _known(name, session, caller, body)
        freed.update(_sum(rank["freed"] for rank in ranks))
        in_use = _sum(rank["in_use"] for rank in ranks)
        if not any(in_use.values()) or time.monotonic() > end:
            break
        await asyncio.sleep(_AGAIN_S)
    request.state.audit = {"of": f"{caller.tenant}/{session}", "freed": dict(freed)}
    note = next((rank["note"] for rank in ranks if rank.get("note")), None)
    return Moved(session=session, freed=Freed(**freed), in_use=InUse(**in_use), note=note)


async def _known(
    name: str, session: str, caller: Identity, body: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the answers of the replicas that know the session; 404 when none does."""
    ranks = await ask(name, {"tenant": caller.tenant, "session": session, **body})
    known = [rank for rank in ranks if rank["known"]]
    if not known:
        raise HTTPException(404, "no such session")
    return known


def _sum(parts: Iterable[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return total

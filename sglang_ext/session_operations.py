"""What a client may ask of its conversations, in the process that owns the tree.

An operation is told the tenant by the HTTP side, never by the client. A session that the tenant
does not have is answered like one that nobody has.
"""

from collections.abc import Callable, Mapping
from typing import Any

from sglang_ext.patches.admin_channel import Operation
from sglang_ext.radix.sessions import Session, SessionId
from sglang_ext.removal import Flushed
from sglang_ext.sessions import close, held, pause, what_returns
from sglang_ext.types import TenantId, Tier

__all__ = ["SESSION_OPERATIONS", "counts"]

_UNKNOWN: dict[str, Any] = {"known": False}


def counts(cache: Any, flushed: Flushed) -> dict[str, dict[str, int]]:
    """Return what left and what stayed, in tokens and in bytes of all ranks, ready for JSON."""
    token_bytes = cache.ledger.bytes_per_token * cache.tp_world_size
    freed = {"hbm_tokens": 0, "hbm_bytes": 0, "cpu_tokens": 0, "cpu_bytes": 0}
    for tier, tokens in flushed.freed.items():
        freed |= {f"{tier}_tokens": tokens, f"{tier}_bytes": tokens * token_bytes}
    in_use = {f"{tier}_tokens": flushed.in_use.get(tier, 0) for tier in (Tier.HBM, Tier.CPU)}
    return {"freed": {**freed, **flushed.below}, "in_use": in_use}


def _with_session(
    act: Callable[[Any, Session, Mapping[str, Any]], dict[str, Any]],
) -> Operation:
    """Return the operation that does ``act`` on the cache and the session that the body names."""

    def operation(scheduler: Any, body: Mapping[str, Any]) -> dict[str, Any]:
        cache = scheduler.tree_cache
        session = cache.sessions.find(SessionId(TenantId(body["tenant"]), body["session"]))
        return _UNKNOWN if session is None else {"known": True, **act(cache, session, body)}

    return operation


def _close(cache: Any, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
    return counts(cache, close(cache, session))


def _pause(cache: Any, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
    to = Tier(body["to"])
    if cache.cache_controller is None:
        note = "nothing was moved: this server has no tier below HBM; set tiers.cpu in its policy"
        return {**counts(cache, Flushed({}, {})), "note": note}
    if to is Tier.NVME and cache.store is None:
        raise ValueError("to: nvme, but this server has no disk tier; expected cpu")
    return counts(cache, pause(cache, session, to))


def _text(cache: Any, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
    back = what_returns(cache, session)
    return {"text": None} if back is None else {"text": back._asdict()}


def _list(scheduler: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a page of a tenant's sessions, the most recently used first."""
    cache, first = scheduler.tree_cache, body["page"] * body["limit"]
    sessions = cache.sessions.of(TenantId(body["tenant"]))
    shown = sessions[first : first + body["limit"]]
    return {"total": len(sessions), "sessions": [_row(cache, session) for session in shown]}


def _row(cache: Any, session: Session) -> dict[str, Any]:
    tokens = {f"{tier}_tokens": count for tier, count in held(cache, session).items()}
    idle_ms = cache.clock.now_ms - session.used_ms
    return {"session": session.id.name, **tokens, "idle_seconds": idle_ms / 1000}


SESSION_OPERATIONS: dict[str, Operation] = {
    "session_close": _with_session(_close),
    "session_pause": _with_session(_pause),
    "session_text": _with_session(_text),
    "session_list": _list,
}

"""What the operator may ask of the process that owns the tree (see ``patches.admin_channel``)."""

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_ext import active
from sglang_ext.namespace import frame
from sglang_ext.patches.admin_channel import Operation
from sglang_ext.prefix_flush import flush_prefix
from sglang_ext.radix.dump import dump
from sglang_ext.radix.sessions import SessionId
from sglang_ext.removal import Flushed
from sglang_ext.session_operations import SESSION_OPERATIONS, counts
from sglang_ext.sessions import close
from sglang_ext.tenancy.policy import TenantPolicy
from sglang_ext.types import Owner, TenantId, Tier

__all__ = ["OPERATIONS"]

_MOST_RUNS = 10_000


def _tree(scheduler: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return one page of the tree's runs."""
    page, limit = (_whole(body, name) for name in ("page", "limit"))
    if not 1 <= limit <= _MOST_RUNS:
        raise ValueError(f"limit: {limit}, expected 1 to {_MOST_RUNS}")
    cache = scheduler.tree_cache
    lower = {} if cache.store is None else {Tier.NVME: cache.store}
    return dump(cache, page, limit, lower)


def _flush(scheduler: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    """Remove from every tier: a tenant, one of its sessions, one of its prefixes, or everything."""
    cache = scheduler.tree_cache
    unknown = set(body) - {"all", "tenant", "session", "prefix", "cache_salt", "extra_key"}
    if unknown:
        raise ValueError(f"{sorted(unknown)[0]}: no such field of a flush")
    if body.get("all") is True and len(body) == 1:
        return counts(cache, _sum(map(cache.flush, _owners(cache))))
    tenant = _tenant(body)
    if "session" in body:
        return counts(cache, _flush_session(cache, tenant, body["session"]))
    if "prefix" in body:
        return counts(cache, flush_prefix(cache, _key(tenant, body)))
    return counts(cache, cache.flush(tenant.owner))


def _flush_session(cache: Any, tenant: TenantPolicy, name: Any) -> Flushed:
    session = cache.sessions.find(SessionId(tenant.name, name)) if isinstance(name, str) else None
    return Flushed({}, {}) if session is None else close(cache, session)


def _key(tenant: TenantPolicy, body: Mapping[str, Any]) -> RadixKey:
    """Return where a request of ``tenant`` for this prefix would look."""
    tokens = body["prefix"]
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise ValueError("prefix: expected text, or a list of token ids")
    for name in ("extra_key", "cache_salt"):
        if not isinstance(body.get(name, ""), str):
            raise ValueError(f"{name}: expected text, as in the requests that are meant")
    namespace = frame(tenant.owner, body.get("extra_key", ""))
    return RadixKey(array("q", tokens), namespace, cache_salt=body.get("cache_salt"))


def _pin(scheduler: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    """Pin what is cached of a prefix for ``milliseconds``, None for ever."""
    cache, tenant = scheduler.tree_cache, _tenant(body)
    milliseconds = body["milliseconds"]
    expires_ms = None if milliseconds is None else cache.clock.now_ms + milliseconds
    answer = cache.pin_prefix(_key(tenant, body), tenant.owner, expires_ms)
    return {"pinned": answer.tokens, "cached": answer.cached, **_pinned(cache, tenant.owner)}


def _unpin(scheduler: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    """Undo all pins of a tenant, or of its sharing group."""
    cache, owner = scheduler.tree_cache, _tenant(body).owner
    removed = cache.pins.remove_all(owner)
    return {"removed": removed, **_pinned(cache, owner)}


def _pins(scheduler: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a tenant has pinned."""
    return _pinned(scheduler.tree_cache, _tenant(body).owner)


def _pinned(cache: Any, owner: Owner) -> dict[str, Any]:
    return {"all_pinned": cache.pins.tokens(owner), "quota": cache.limits(owner).quota}


def _sum(flushed: Iterable[Flushed]) -> Flushed:
    freed: Counter[Tier] = Counter()
    in_use: Counter[Tier] = Counter()
    disk_bytes, remote_bytes = 0, None
    for one in flushed:
        freed.update(one.freed)
        in_use.update(one.in_use)
        disk_bytes += one.disk_bytes
        if one.remote_bytes is not None:
            remote_bytes = (remote_bytes or 0) + one.remote_bytes
    return Flushed(freed, in_use, disk_bytes, remote_bytes)


def _owners(cache: Any) -> list[Owner]:
    """Return everybody who has pages; public text is flushed with everybody's."""
    stored = [] if cache.store is None else cache.store.owners()
    return sorted({*(owner for owner, _, _ in cache.ledger), *stored}, reverse=True)


def _tenant(body: Mapping[str, Any]) -> TenantPolicy:
    name = body.get("tenant")
    tenant = active.policy().tenants.get(TenantId(name)) if isinstance(name, str) else None
    if tenant is None or "all" in body or {"session", "prefix"} <= set(body):
        raise ValueError(
            f"tenant: {name!r}, expected one of the policy file, with a session, a prefix or "
            "neither; or all: true alone"
        )
    return tenant


def _whole(body: Mapping[str, Any], name: str) -> int:
    value = body.get(name)
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{name}: {value!r}, expected a whole number from 0")
    return value


OPERATIONS: dict[str, Operation] = {
    "flush": _flush,
    "pin": _pin,
    "pins": _pins,
    "tree": _tree,
    "unpin": _unpin,
    **SESSION_OPERATIONS,
}

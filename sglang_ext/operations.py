"""What the operator may ask of the process that owns the tree (see ``patches.admin_channel``)."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from sglang_ext import active
from sglang_ext.patches.admin_channel import Operation
from sglang_ext.radix.dump import dump
from sglang_ext.types import Owner, TenantId

__all__ = ["OPERATIONS"]

_MOST_RUNS = 10_000


def _tree(scheduler: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return one page of the tree's runs."""
    page, limit = (_whole(body, name) for name in ("page", "limit"))
    if not 1 <= limit <= _MOST_RUNS:
        raise ValueError(f"limit: {limit}, expected 1 to {_MOST_RUNS}")
    return dump(scheduler.tree_cache, page, limit)


def _flush(scheduler: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the pages of one tenant, or of everybody, from every tier."""
    cache = scheduler.tree_cache
    freed: Counter[str] = Counter(hbm_tokens=0, cpu_tokens=0, nvme_bytes=0)
    in_use: Counter[str] = Counter(hbm_tokens=0, cpu_tokens=0)
    for owner in _owners(cache, body):
        flushed = cache.flush(owner)
        freed.update({f"{tier}_tokens": tokens for tier, tokens in flushed.freed.items()})
        freed["nvme_bytes"] += flushed.disk_bytes
        in_use.update({f"{tier}_tokens": tokens for tier, tokens in flushed.in_use.items()})
    return {"freed": dict(freed), "in_use": dict(in_use)}


def _owners(cache: Any, body: Mapping[str, Any]) -> list[Owner]:
    """Return whose pages are meant; public text is flushed with everybody's."""
    if body.get("all") is True and "tenant" not in body:
        stored = [] if cache.store is None else cache.store.owners()
        return sorted({*(owner for owner, _, _ in cache.ledger), *stored}, reverse=True)
    name = body.get("tenant")
    tenant = active.policy().tenants.get(TenantId(name)) if isinstance(name, str) else None
    if tenant is None or "all" in body:
        raise ValueError(f"tenant: {name!r}, expected one of the policy file, or all: true alone")
    return [tenant.owner]


def _whole(body: Mapping[str, Any], name: str) -> int:
    value = body.get(name)
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{name}: {value!r}, expected a whole number from 0")
    return value


OPERATIONS: dict[str, Operation] = {"flush": _flush, "tree": _tree}

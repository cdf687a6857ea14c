"""Another policy in the process that owns the tree, and what belonged to who is no longer in it.

First every rank checks the policy against its own pools, then all put it in force. Requests reach
the ranks of one engine in the same order, so that all of them do it between the same two steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any

from sglang_ext import active
from sglang_ext.cache_backend import quota_books, residency, watermark
from sglang_ext.errors import SglangExtError
from sglang_ext.patches.admin_channel import Operation
from sglang_ext.patches.admission import refuse_outgrown
from sglang_ext.quotas import check_books
from sglang_ext.residency import lifetimes
from sglang_ext.tenancy.changes import check_live
from sglang_ext.tenancy.document import version_of
from sglang_ext.tenancy.identity import tenant_of_id
from sglang_ext.tenancy.loader import build_policy
from sglang_ext.tenancy.policy import Loading, Policy, TenantPolicy
from sglang_ext.tenancy.quota import QuotaBook
from sglang_ext.types import Owner, TenantId, Tier

__all__ = ["policy_operations"]

_IN_MEMORY = (Tier.HBM, Tier.CPU)


@dataclass(frozen=True)
class _Prepared:
    """A policy that fits this rank, and all that it means here."""

    version: str
    policy: Policy
    books: list[QuotaBook]
    store_book: QuotaBook | None
    watermark: int


def policy_operations() -> dict[str, Operation]:
    """Return the operations of one scheduler process, by name."""
    changes = _Changes()
    operations = {
        "policy_check": changes.check,
        "policy_apply": changes.apply,
        "close_sessions": _close_sessions,
        "remove_owner": _remove_owner,
        "usage": _usage,
    }
    return {name: _in_words(operation) for name, operation in operations.items()}


class _Changes:
    """Keeps the last policy that was checked, until it is put in force."""

    def __init__(self) -> None:
        self._prepared: _Prepared | None = None

    def check(self, scheduler: Any, body: Mapping[str, Any]) -> dict[str, Any]:
        """Check ``document``; nothing changes."""
        self._prepared = None
        policy = build_policy(body.get("document"))
        check_live(active.policy(), policy)
        self._prepared = _prepare(policy, scheduler.tree_cache)
        return {"version": self._prepared.version}

    def apply(self, scheduler: Any, body: Mapping[str, Any]) -> dict[str, Any]:
        """Put in force what was checked last, if it is ``version``. O(owners log owners)."""
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared.version != body.get("version"):
            raise ValueError(f"version: {body.get('version')!r} is not the policy checked last")
        _use(prepared, scheduler.tree_cache)
        scheduler.tenant_scheduling.use(prepared.policy)
        active.use(prepared.policy)
        refused = refuse_outgrown(scheduler.tenant_scheduling, scheduler)
        return {"refused_requests": refused}


def _prepare(policy: Policy, cache: Any) -> _Prepared:
    if cache.sealing is not None:
        cache.sealing.check(policy)
    books = quota_books(policy, cache)
    check_books(cache, books)
    return _Prepared(
        version=version_of(policy.document),
        policy=policy,
        books=books,
        store_book=None if cache.store is None else cache.store.book(policy),
        watermark=watermark(policy, cache),
    )


def _use(prepared: _Prepared, cache: Any) -> None:
    cache.limit(prepared.books)
    cache.worth.always = prepared.policy.tiers.load is Loading.ALWAYS
    if prepared.store_book is not None:
        cache.store.use(prepared.policy, prepared.store_book)
    found = lifetimes(prepared.policy)
    if cache.residency is None:
        cache.residency = residency(prepared.policy, cache)
    else:
        cache.residency.use(found, prepared.watermark)
    if cache.lifespans is not None:
        cache.lifespans.use(found)


def _remove_owner(scheduler: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the pages of ``owner`` from every tier.

    Says what was freed, and what is left because requests or copies still hold it.
    """
    cache, owner = scheduler.tree_cache, Owner(body["owner"])
    flushed = cache.flush(owner)
    freed = {f"{tier}_tokens": flushed.freed.get(tier, 0) for tier in _IN_MEMORY}
    left = {f"{tier}_tokens": cache.ledger.usage(owner, tier).tokens for tier in _IN_MEMORY}
    below = {"nvme_bytes": 0} if cache.store is None else cache.store.left(owner)
    return {"freed": {**freed, **flushed.below}, "left": {**left, **below}}


def _close_sessions(scheduler: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    """Close SGLang's sessions of ``tenants``, and forget ours."""
    from sglang.srt.managers.io_struct import CloseSessionReqInput

    tenants = [TenantId(name) for name in body["tenants"]]
    for session in [one for name in tenants for one in scheduler.tree_cache.sessions.of(name)]:
        scheduler.tree_cache.sessions.forget(session)
    ids = [id for id in scheduler.session_controller.sessions if tenant_of_id(id) in tenants]
    for id in ids:
        scheduler.close_session(CloseSessionReqInput(session_id=id))
    return {"closed": len(ids)}


def _usage(scheduler: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what each of ``tenants`` holds and may hold now, by tier. O(those)."""
    known = active.policy().tenants
    tenants = [known[TenantId(name)] for name in body["tenants"] if name in known]
    return {"tenants": {tenant.name: _held(scheduler.tree_cache, tenant) for tenant in tenants}}


def _held(cache: Any, tenant: TenantPolicy) -> dict[str, Any]:
    owner, store = tenant.owner, cache.store
    present = [Tier.HBM] if cache.host_pool_group is None else list(_IN_MEMORY)
    rows = [
        (tier, cache.ledger.usage(owner, tier).tokens, cache.limits(owner, tier))
        for tier in present
    ]
    if store is not None:
        rows += store.rows(owner)
    return {
        "owner": owner,
        "sessions": len(cache.sessions.of(tenant.name)),
        "tiers": {
            tier.value: {
                "held_tokens": tokens,
                "quota_tokens": limits.quota,
                "hard": limits.hard,
                "reserve_tokens": limits.reserve,
            }
            for tier, tokens, limits in rows
        },
    }


def _in_words(operation: Operation) -> Operation:
    """Let our errors refuse the request, with their words."""

    @wraps(operation)
    def run(scheduler: Any, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return operation(scheduler, body)
        except SglangExtError as error:
            raise ValueError(str(error)) from error

    return run

"""Moves pages down as they age: the executor of ``tiering.placement``, on the cache's tick.

Decisions rest on the shared clock and on the tree alone, so that every rank takes the same. Only
the disk has its own clock; what one rank's disk dropped is a miss on all.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from sglang_ext.radix.order import Reason
from sglang_ext.tenancy.policy import Policy, Ttl, TtlMode, TtlSince
from sglang_ext.tiering.placement import Lifetime, Verdict, judge
from sglang_ext.types import Owner, Tier

__all__ = ["Residency", "lifetimes"]

_ROUND_MS = 100
_DISK_ROUND_MS = 1000
_FREED = (Verdict.DEMOTE, Verdict.DROP)


def lifetimes(policy: Policy) -> dict[Owner, Lifetime]:
    """Return how long the pages of each owner stay. Members of a group state the same."""
    return {tenant.owner: _lifetime(tenant.ttl) for tenant in policy.tenants.values()}


def _lifetime(ttl: Ttl) -> Lifetime:
    hbm, cpu, nvme = (round(seconds * 1000) for seconds in (ttl.hbm, ttl.cpu, ttl.nvme))
    strict = ttl.mode is TtlMode.STRICT
    fixed = ttl.since is TtlSince.CREATED
    return Lifetime(hbm_ms=hbm, cpu_ms=cpu, nvme_ms=nvme, strict=strict, fixed=fixed)


class Residency:
    """Ages the pages of one cache. Owners without a lifetime, such as public text, never age."""

    def __init__(
        self,
        cache: Any,
        lifetimes: Mapping[Owner, Lifetime],
        watermark: int = 0,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """``watermark``: tokens of HBM kept free where there is a tier below."""
        self._cache = cache
        self._lifetimes = lifetimes
        self._watermark = watermark
        self._wall_clock = wall_clock
        self._due_ms = 0
        self._disk_due_ms = 0
        has_cpu = cache.cache_controller is not None
        self._tiers = (Tier.HBM, Tier.CPU) if has_cpu else (Tier.HBM,)
        self._lowest = Tier.NVME if cache.store is not None else self._tiers[-1]
        cache.tree_core.victims.expire(self._is_expired)

    def use(self, lifetimes: Mapping[Owner, Lifetime], watermark: int) -> None:
        """Let other times hold from the next tick on, for pages that are there already too."""
        self._lifetimes, self._watermark = lifetimes, watermark

    def tick(self, now_ms: int) -> None:
        """Free what is over, and find who has expired leaves.

        O(owners + freed), ten times a second; O(1) in between.
        """
        if now_ms < self._due_ms:
            return
        self._due_ms = now_ms + _ROUND_MS
        for tier in self._tiers:
            self._age(tier)
        self._make_room()
        if self._lowest is Tier.NVME and now_ms >= self._disk_due_ms:
            self._disk_due_ms = now_ms + _DISK_ROUND_MS
            self._age_disk()

    def _age(self, tier: Tier) -> None:
        victims = self._cache.tree_core.victims
        leaves = victims.leaves(tier)
        for owner in leaves.by_owner():
            if not self._is_expired(tier, leaves.oldest_of(owner)):
                continue
            while self._lifetimes[owner].strict and self._free_round(owner, tier):
                pass
            if self._is_expired(tier, leaves.oldest_of(owner)):
                victims.expired[tier].add(owner)

    def _free_round(self, owner: Owner, tier: Tier) -> bool:
        """Free the expired leaves of an owner; True when some went, as their parents may follow."""
        order = self._cache.tree_core.victims.leaves(tier).by_owner().get(owner)
        aged = [] if order is None else order.aged(lambda leaf: self._is_expired(tier, leaf))
        freed = [self._free(leaf, tier) for leaf in aged]
        return any(freed)

    def _free(self, leaf: Any, tier: Tier) -> bool:
        # Every page was offered to the disk. What it took is not asked: ranks would differ.
        copied = tier is Tier.CPU or self._lowest is Tier.HBM or self._cache.copy_down(leaf)
        verdict = judge(
            tier,
            self._idle_ms(leaf),
            self._lifetimes[leaf.owner],
            lowest=self._lowest,
            copied=copied,
        )
        return verdict in _FREED and self._cache.free_leaf(leaf, tier, Reason.TTL)

    def _make_room(self) -> None:
        """Demote the next victims while they are not needed, so that a burst finds free slots."""
        cache = self._cache
        missing = self._watermark - cache.token_to_kv_pool_allocator.available_size()
        if missing > 0 and Tier.CPU in self._tiers:
            cache.make_room(missing)

    def _age_disk(self) -> None:
        now = self._wall_clock()
        for owner in self._cache.store.owners():
            lifetime = self._lifetimes.get(owner)
            if lifetime is not None:
                self._cache.store.expire(owner, now - lifetime.nvme_ms / 1000)

    def _is_expired(self, tier: Tier, leaf: Any) -> bool:
        if leaf is None or leaf.owner not in self._lifetimes:
            return False
        return self._idle_ms(leaf) >= self._lifetimes[leaf.owner].of(tier)

    def _idle_ms(self, leaf: Any) -> int:
        return int(self._cache.clock.now_ms - leaf.access_ms)

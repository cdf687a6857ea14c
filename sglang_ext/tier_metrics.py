"""Metrics of the tiers: what left them and why, and what the store below met with."""

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any

from sglang_ext.metrics import TenantLabels
from sglang_ext.observe.catalog import make
from sglang_ext.types import Owner, Tier

__all__ = ["TierMetrics", "capacities", "on_disk"]


def on_disk(cache: Any) -> dict[tuple[Owner, Tier], int]:
    """Return the tokens of each owner on the disk; empty without an NVMe tier. O(owners)."""
    store = cache.store
    if store is None:
        return {}
    held = store.held_bytes().items()
    return {(owner, Tier.NVME): taken // store.bytes_per_token for owner, taken in held}


def capacities(cache: Any) -> dict[Tier, int]:
    """Return the tokens that each tier of a cache can hold. O(1)."""
    pools = {Tier.HBM: cache.token_to_kv_pool_allocator, Tier.CPU: cache.host_pool_group}
    found = {tier: int(pool.size) for tier, pool in pools.items() if pool is not None}
    if cache.store is not None:
        total = cache.store.backend.config.caps.total_bytes
        found[Tier.NVME] = int(total // cache.store.bytes_per_token)
    return found


class TierMetrics:
    """Turns totals that only grow into Prometheus counters.

    prometheus_client is imported here, after SGLang has chosen its folder for several processes.
    """

    def __init__(self, owner_limit: int) -> None:
        self._labels = TenantLabels(owner_limit)
        self._evicted = make("evicted_tokens_total")
        self._events = make("store_events_total")
        self._capacity = make("tier_capacity_tokens")
        self._seen: Counter[Hashable] = Counter()

    def publish(self, cache: Any) -> None:
        """Add what happened since the last time. O(owners)."""
        for tier, tokens in capacities(cache).items():
            self._capacity.labels(tier.value).set(tokens)
        for eviction, tokens in self._news(cache.evictions):
            owner = self._labels.of(eviction.owner or "public", tokens)
            self._evicted.labels(owner, eviction.tier.value, eviction.reason.value).inc(tokens)
        for event, count in self._news({} if cache.store is None else cache.store.counters()):
            self._events.labels(event).inc(count)

    def _news(self, totals: Mapping[Any, int]) -> list[tuple[Any, int]]:
        news = [(key, total - self._seen[key]) for key, total in totals.items()]
        self._seen.update(dict(news))
        return [(key, grown) for key, grown in news if grown]

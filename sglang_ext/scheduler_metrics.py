"""The ``sglang_ext_*`` metrics of the scheduler's process: queues, shares and what owners hold."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from sglang_ext.metrics import OTHER, HeldMetrics, TenantLabels
from sglang_ext.observe.catalog import make
from sglang_ext.observe.ghosts import GhostPages
from sglang_ext.observe.reuse import reuse
from sglang_ext.observe.usage import HeldUsage
from sglang_ext.tier_metrics import TierMetrics, capacities, on_disk
from sglang_ext.types import Owner, OwnerLimits, TenantId, Tier

__all__ = ["SchedulerMetrics"]


class SchedulerMetrics:
    """Made on one rank of each engine, since all ranks decide alike.

    prometheus_client is imported here, after SGLang has chosen its folder for several processes.
    """

    def __init__(
        self, tenant_limit: int, tenants: Sequence[str] = (), usage: HeldUsage | None = None
    ) -> None:
        """``tenants`` have their counters from the beginning, ``usage`` takes in what is billed."""
        self._labels = TenantLabels(tenant_limit)
        self._held = HeldMetrics(tenant_limit)
        self._tiers = TierMetrics(tenant_limit, usage)
        self._published: set[str] = set()
        self._due = 0.0
        self._queue_time = make("queue_time_seconds")
        self._skipped = make("admissions_skipped_total")
        self._refused = make("admissions_refused_total")
        self._preempted = make("preemptions_total")
        self._queued = make("queued_requests")
        self._deficit = make("deficit_tokens")
        self._quota = make("quota_tokens")
        self._reserve = make("reserve_tokens")
        self._recomputed = make("recomputed_tokens_total")
        self._ghosts = GhostPages()
        self._usage = usage
        for tenant in tenants[:tenant_limit]:
            self._recomputed.labels(self._labels.of(tenant, 0))

    def admitted(self, tenant: TenantId, seconds: float) -> None:
        """Record how long a request waited."""
        self._queue_time.labels(self._labels.of(tenant)).observe(seconds)

    def computes(
        self,
        tenant: TenantId,
        namespace: str,
        prompt: Sequence[int],
        cached: int,
        page_size: int,
        first: bool = True,
    ) -> None:
        """Count what a request computes again of its ``prompt`` behind ``cached`` tokens.

        ``first``: it has not been computed in part before, so that its text comes from its client.
        """
        seen = self._ghosts.computed(namespace, prompt, cached, page_size)
        self._recomputed.labels(self._labels.of(tenant, 0)).inc(seen.again)
        if first and self._usage is not None:
            self._usage.reused(tenant, reuse(seen.idle, page_size))

    def skipped(self, tenant: TenantId, reason: str) -> None:
        """Count a pass that admitted others past a request of ``tenant``."""
        self._skipped.labels(self._labels.of(tenant, 0), reason).inc()

    def refused(self, tenant: TenantId, reason: str) -> None:
        """Count a request that was not taken."""
        self._refused.labels(self._labels.of(tenant, 0), reason).inc()

    def preempted(self, tenant: TenantId, reason: str) -> None:
        """Count a request that had begun and waits again."""
        self._preempted.labels(self._labels.of(tenant, 0), reason).inc()

    def due(self, seconds: float) -> bool:
        """Tell whether ``seconds`` have gone by since this last returned True."""
        now = time.monotonic()
        if now < self._due:
            return False
        self._due = now + seconds
        return True

    def publish(
        self, queued: Mapping[TenantId, int], deficits: Mapping[TenantId, float], cache: Any
    ) -> None:
        """Set all gauges; ``cache`` is the TenantRadixCache. O(tenants and owners)."""
        names = queued.keys() | deficits.keys()
        waiting = Counter({name: queued.get(name, 0) for name in names})
        self._set(self._queued, waiting)
        self._set(self._deficit, deficits)
        self._published |= {self._labels.of(name, 0) for name in names}
        held = {(owner, tier): usage.tokens for owner, tier, usage in cache.ledger}
        self._held.publish(held | on_disk(cache))
        self._tiers.publish(cache)
        self._publish_limits(cache, {owner for owner, _ in held if owner})

    def _publish_limits(self, cache: Any, owners: Iterable[Owner]) -> None:
        """Publish quota and reserve of who has a label, in every tier that there is."""
        tiers = capacities(cache)
        for owner in owners:
            label = self._labels.of(owner, 0)
            if label == OTHER:
                continue
            for tier in tiers:
                limits = _limits(cache, owner, tier)
                if limits.quota is not None:
                    self._quota.labels(label, tier.value).set(limits.quota)
                self._reserve.labels(label, tier.value).set(limits.reserve)

    def _set(self, gauge: Any, values: Mapping[TenantId, float]) -> None:
        """Set a gauge by tenant; who has no value now falls to 0, who has no label is summed."""
        sums = dict.fromkeys(self._published, 0.0)
        for label, value in self._labelled(values):
            sums[label] = sums.get(label, 0.0) + value
        for label, value in sums.items():
            gauge.labels(label).set(value)

    def _labelled(self, values: Mapping[TenantId, float]) -> Iterator[tuple[str, float]]:
        for tenant, value in values.items():
            yield self._labels.of(tenant, 0), value


def _limits(cache: Any, owner: Owner, tier: Tier) -> OwnerLimits:
    limits: OwnerLimits = (
        cache.store.limits(owner) if tier is Tier.NVME else cache.limits(owner, tier)
    )
    return limits

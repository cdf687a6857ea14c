"""The ``sglang_ext_*`` metrics of the scheduler's process: queues, shares and what owners hold."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from sglang_ext.metrics import OTHER, HeldMetrics, TenantLabels
from sglang_ext.tier_metrics import TierMetrics, on_disk
from sglang_ext.types import TenantId, Tier

__all__ = ["SchedulerMetrics"]

_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class SchedulerMetrics:
    """Made on one rank of each engine, since all ranks decide alike.

    prometheus_client is imported here, after SGLang has chosen its folder for several processes.
    """

    def __init__(self, tenant_limit: int) -> None:
        from prometheus_client import Counter as Total
        from prometheus_client import Gauge, Histogram

        def gauge(name: str, text: str, *labels: str) -> Any:
            name = f"sglang_ext_{name}"
            return Gauge(name, text, labelnames=labels, multiprocess_mode="livesum")

        self._labels = TenantLabels(tenant_limit)
        self._held = HeldMetrics(tenant_limit)
        self._tiers = TierMetrics(tenant_limit)
        self._published: set[str] = set()
        self._due = 0.0
        self._queue_time = Histogram(
            "sglang_ext_queue_time_seconds",
            "From arrival in the scheduler to the first admission.",
            labelnames=("tenant",),
            buckets=_SECONDS,
        )
        text = "Admission passes that passed over a waiting request: quota, memory or turn."
        self._skipped = Total(
            "sglang_ext_admissions_skipped_total", text, labelnames=("tenant", "reason")
        )
        self._refused = Total(
            "sglang_ext_admissions_refused_total",
            "Requests refused by the scheduler: too_large or queue_full.",
            labelnames=("tenant", "reason"),
        )
        self._queued = gauge("queued_requests", "Requests that wait.", "tenant")
        self._deficit = gauge(
            "deficit_tokens",
            "Weighted tokens that a waiting tenant lacks to its fair share.",
            "tenant",
        )
        self._quota = gauge("quota_tokens", "Ceiling of an owner.", "owner", "tier")
        self._reserve = gauge("reserve_tokens", "Floor of an owner.", "owner", "tier")

    def admitted(self, tenant: TenantId, seconds: float) -> None:
        """Record how long a request waited."""
        self._queue_time.labels(self._labels.of(tenant)).observe(seconds)

    def skipped(self, tenant: TenantId, reason: str) -> None:
        """Count a pass that admitted others past a request of ``tenant``."""
        self._skipped.labels(self._labels.of(tenant), reason).inc()

    def refused(self, tenant: TenantId, reason: str) -> None:
        """Count a request that was not taken."""
        self._refused.labels(self._labels.of(tenant), reason).inc()

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
        self._published |= {self._labels.of(name) for name in names}
        held = {(owner, tier): usage.tokens for owner, tier, usage in cache.ledger}
        self._held.publish(held | on_disk(cache))
        self._tiers.publish(cache)
        for owner in {owner for owner, _ in held if owner}:
            limits = cache.limits(owner)
            label = self._labels.of(owner)
            if label == OTHER:
                continue
            if limits.quota is not None:
                self._quota.labels(label, Tier.HBM.value).set(limits.quota)
            self._reserve.labels(label, Tier.HBM.value).set(limits.reserve)

    def _set(self, gauge: Any, values: Mapping[TenantId, float]) -> None:
        """Set a gauge by tenant; who has no value now falls to 0, who has no label is summed."""
        sums = dict.fromkeys(self._published, 0.0)
        for label, value in self._labelled(values):
            sums[label] = sums.get(label, 0.0) + value
        for label, value in sums.items():
            gauge.labels(label).set(value)

    def _labelled(self, values: Mapping[TenantId, float]) -> Iterator[tuple[str, float]]:
        for tenant, value in values.items():
            yield self._labels.of(tenant), value

"""However many tenants there are, /metrics stays small (trial 97), and every token is on it."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from sglang_ext.metrics import OTHER, FinishedRequest, RequestMetrics
from sglang_ext.radix.ledger import Ledger
from sglang_ext.radix.order import Reason
from sglang_ext.radix.victims import Eviction
from sglang_ext.scheduler_metrics import SchedulerMetrics
from sglang_ext.types import Owner, OwnerLimits, TenantId, Tier
from tests.sglang_ext.published import a_cache

_TENANTS = [TenantId(f"tenant-{number:05}") for number in range(10_000)]
_MOST_BYTES = 2_000_000


@pytest.mark.trial(97)
def test_trial_97_ten_thousand_tenants_stay_below_two_megabytes(
    registry: CollectorRegistry,
) -> None:
    http, scheduler = RequestMetrics(50, _TENANTS), SchedulerMetrics(50, _TENANTS)
    http.page_size = 16
    for number, tenant in enumerate(_TENANTS):
        with http.request(tenant):
            pass
        http.first_token(tenant, 0.1)
        http.finished(_request(tenant, number))
        scheduler.admitted(tenant, 0.1)
        scheduler.skipped(tenant, "quota")
        scheduler.refused(tenant, "queue_full")
        scheduler.computes(tenant, tenant, range(64), 0, 16)
    ledger = Ledger()
    for tenant in _TENANTS:
        for tier in (Tier.HBM, Tier.CPU):
            ledger.book(Owner(f"t:{tenant}"), tier, 16, 0)
    waiting = dict.fromkeys(_TENANTS, 1)
    quota = OwnerLimits(quota=100)
    cache = a_cache(ledger=ledger, limits=lambda *_: quota, evictions=_evictions())
    cache.token_time.settle([held[:2] for held in ledger], lambda _: 16, 0)
    cache.clock.now_ms = 1000
    scheduler.publish(waiting, waiting, cache)
    text = generate_latest(registry)
    assert len(text) < _MOST_BYTES
    for name, total in {
        "prompt_tokens_total": sum(100 + number for number in range(len(_TENANTS))),
        "queued_requests": len(_TENANTS),
        "requests_total": len(_TENANTS),
        "held_tokens": 2 * 16 * len(_TENANTS),
        "token_seconds_total": 2 * 16 * len(_TENANTS),
        "evicted_tokens_total": 2 * len(Reason) * len(_TENANTS),
    }.items():
        assert _sum(registry, f"sglang_ext_{name}") == total
    assert f'tenant="{OTHER}"'.encode() in text


def _evictions() -> dict[Eviction, int]:
    return {
        Eviction(Owner(f"t:{tenant}"), tier, reason): 1
        for tenant in _TENANTS
        for tier in (Tier.HBM, Tier.CPU)
        for reason in Reason
    }


def _request(tenant: TenantId, number: int) -> FinishedRequest:
    cached = {"hbm": 16, "cpu": 16, "nvme": 16}
    return FinishedRequest(
        tenant=tenant, prompt=100 + number, output=7, cached=cached, seconds=0.3, first_token=0.1
    )


def _sum(registry: CollectorRegistry, name: str) -> float:
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    return sum(sample.value for sample in samples if sample.name == name)

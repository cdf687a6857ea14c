"""The scheduler's metrics on a registry of the test's own."""

from array import array
from types import SimpleNamespace

from prometheus_client import CollectorRegistry

from sglang_ext.radix.ledger import Ledger
from sglang_ext.scheduler_metrics import SchedulerMetrics
from sglang_ext.types import Owner, OwnerLimits, TenantId, Tier
from tests.sglang_ext.published import a_cache

A, B, C = TenantId("a"), TenantId("b"), TenantId("c")
NO_LIMITS = OwnerLimits()


def _cache(held: dict[str, int], limits: OwnerLimits = NO_LIMITS) -> SimpleNamespace:
    ledger = Ledger()
    for owner, tokens in held.items():
        ledger.book(Owner(owner), Tier.HBM, tokens, 0)
    return a_cache(
        ledger=ledger,
        limits=lambda owner, tier: limits,
        token_to_kv_pool_allocator=SimpleNamespace(size=1000),
        host_pool_group=None,
    )


def test_what_happens_to_requests_is_counted(registry: CollectorRegistry) -> None:
    metrics = SchedulerMetrics(5)
    metrics.admitted(A, 0.3)
    metrics.skipped(A, "quota")
    metrics.skipped(A, "quota")
    metrics.refused(B, "queue_full")
    value = registry.get_sample_value
    assert value("sglang_ext_queue_time_seconds_count", {"tenant": "a"}) == 1
    assert value("sglang_ext_queue_time_seconds_sum", {"tenant": "a"}) == 0.3
    skipped = {"tenant": "a", "reason": "quota"}
    assert value("sglang_ext_admissions_skipped_total", skipped) == 2
    refused = {"tenant": "b", "reason": "queue_full"}
    assert value("sglang_ext_admissions_refused_total", refused) == 1


def test_a_prompt_that_is_computed_again_is_counted(registry: CollectorRegistry) -> None:
    metrics = SchedulerMetrics(5)
    prompt = array("q", range(100))
    for cached in (0, 64, 96, 0):
        metrics.computes(A, "t:a", prompt, cached, 16)
    again = registry.get_sample_value("sglang_ext_recomputed_tokens_total", {"tenant": "a"})
    assert again == 0 + 32 + 0 + 96


def test_gauges_follow_queues_shares_and_holdings(registry: CollectorRegistry) -> None:
    metrics = SchedulerMetrics(5)
    limits = OwnerLimits(quota=500, reserve=100)
    metrics.publish({A: 3}, {A: -20.0, B: 20.0}, _cache({"t:a": 40}, limits))
    value = registry.get_sample_value
    assert value("sglang_ext_queued_requests", {"tenant": "a"}) == 3
    assert value("sglang_ext_deficit_tokens", {"tenant": "b"}) == 20
    owner = {"owner": "t:a", "tier": "hbm"}
    assert value("sglang_ext_held_tokens", owner) == 40
    assert value("sglang_ext_quota_tokens", owner) == 500
    assert value("sglang_ext_reserve_tokens", owner) == 100
    assert value("sglang_ext_tier_capacity_tokens", {"tier": "hbm"}) == 1000
    assert value("sglang_ext_tier_capacity_tokens", {"tier": "cpu"}) is None
    metrics.publish({}, {}, _cache({}))
    assert value("sglang_ext_queued_requests", {"tenant": "a"}) == 0
    assert value("sglang_ext_deficit_tokens", {"tenant": "b"}) == 0
    assert value("sglang_ext_held_tokens", owner) == 0


def test_tenants_without_a_label_are_summed(registry: CollectorRegistry) -> None:
    metrics = SchedulerMetrics(1)
    metrics.publish({A: 1, B: 2, C: 4}, {}, _cache({"t:a": 1, "t:b": 2}, OwnerLimits(quota=9)))
    queued = {
        sample.labels["tenant"]: sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "sglang_ext_queued_requests"
    }
    assert set(queued) - {"other"} <= {"a", "b", "c"}
    assert len(queued) == 2
    assert sum(queued.values()) == 7
    other = {"owner": "other", "tier": "hbm"}
    assert registry.get_sample_value("sglang_ext_quota_tokens", other) is None


def test_publishing_is_due_once_in_a_while(registry: CollectorRegistry) -> None:
    metrics = SchedulerMetrics(1)
    assert metrics.due(3600)
    assert not metrics.due(3600)

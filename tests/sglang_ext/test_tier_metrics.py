"""Totals of the tiers become counters once, however often they are published."""

import functools
from types import SimpleNamespace

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry

from sglang_ext.radix.order import Reason
from sglang_ext.radix.victims import Eviction
from sglang_ext.tier_metrics import TierMetrics, on_disk
from sglang_ext.types import PUBLIC, Owner, Tier

A = Owner("t:a")
POOLS = {
    "token_to_kv_pool_allocator": SimpleNamespace(size=20),
    "host_pool_group": SimpleNamespace(size=40),
}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> CollectorRegistry:
    fresh = CollectorRegistry()
    for kind in ("Counter", "Gauge"):
        metric = functools.partial(getattr(prometheus_client, kind), registry=fresh)
        monkeypatch.setattr(prometheus_client, kind, metric)
    return fresh


def test_what_left_and_what_happened_is_counted_once(registry: CollectorRegistry) -> None:
    evictions = {Eviction(A, Tier.HBM, Reason.TTL): 16, Eviction(PUBLIC, Tier.CPU, Reason.FLUSH): 8}
    counts = {"corrupt": 1}
    caps = SimpleNamespace(caps=SimpleNamespace(total_bytes=1050))
    store = SimpleNamespace(
        counters=lambda: counts, bytes_per_token=100, backend=SimpleNamespace(config=caps)
    )
    cache = SimpleNamespace(evictions=evictions, store=store, **POOLS)
    metrics = TierMetrics(5)
    metrics.publish(cache)
    metrics.publish(cache)
    evictions[Eviction(A, Tier.HBM, Reason.TTL)] = 48
    counts["corrupt"] = 3
    metrics.publish(cache)
    value = registry.get_sample_value
    name = "sglang_ext_evicted_tokens_total"
    assert value(name, {"owner": "t:a", "tier": "hbm", "reason": "ttl"}) == 48
    assert value(name, {"owner": "public", "tier": "cpu", "reason": "flush"}) == 8
    assert value("sglang_ext_store_events_total", {"event": "corrupt"}) == 3
    capacity = {tier: value("sglang_ext_tier_capacity_tokens", {"tier": tier}) for tier in Tier}
    assert capacity == {Tier.HBM: 20, Tier.CPU: 40, Tier.NVME: 10, Tier.REMOTE: None}


def test_without_a_store_nothing_of_it_is_published(registry: CollectorRegistry) -> None:
    cache = SimpleNamespace(evictions={}, store=None, **POOLS)
    TierMetrics(5).publish(cache)
    assert on_disk(cache) == {}
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    assert {sample.labels["tier"] for sample in samples} == {"hbm", "cpu"}


def test_tokens_on_disk_are_bytes_by_what_a_token_takes_there() -> None:
    store = SimpleNamespace(held_bytes=lambda: {A: 1000}, bytes_per_token=100)
    assert on_disk(SimpleNamespace(store=store)) == {(A, Tier.NVME): 10}

"""Totals of the tiers become counters once, however often they are published."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from sglang_ext.fetching import Outcome
from sglang_ext.observe.usage import HeldUsage, UsageRecorder
from sglang_ext.observe.usage_store import UsageStore
from sglang_ext.radix.order import Reason
from sglang_ext.radix.victims import Eviction
from sglang_ext.tier_metrics import TierMetrics, on_disk
from sglang_ext.tiering.worth import Choice
from sglang_ext.types import PUBLIC, Owner, Tier
from tests.sglang_ext.published import a_cache

A = Owner("t:a")


def test_what_left_and_what_happened_is_counted_once(registry: CollectorRegistry) -> None:
    evictions = {Eviction(A, Tier.HBM, Reason.TTL): 16, Eviction(PUBLIC, Tier.CPU, Reason.FLUSH): 8}
    counts = {"corrupt": 1}
    caps = SimpleNamespace(caps=SimpleNamespace(total_bytes=1050))
    store = SimpleNamespace(
        counters=lambda: counts,
        bytes_per_token=100,
        backend=SimpleNamespace(config=caps),
        remote=None,
        held_bytes=lambda: {},
    )
    cache = a_cache(evictions=evictions, store=store)
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
    cache = a_cache()
    TierMetrics(5).publish(cache)
    assert on_disk(cache) == {}
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    tiers = {sample.labels["tier"] for sample in samples if "tier" in sample.labels}
    assert tiers == {"hbm", "cpu"}


def test_tokens_on_disk_are_bytes_by_what_a_token_takes_there() -> None:
    store = SimpleNamespace(held_bytes=lambda: {A: 1000}, bytes_per_token=100)
    assert on_disk(SimpleNamespace(store=store)) == {(A, Tier.NVME): 10}


def test_moves_fetches_and_choices_become_counters(registry: CollectorRegistry) -> None:
    cache = a_cache()
    metrics = TierMetrics(5)
    for bytes_, seconds in ((100, 0.5), (300, 0.25)):
        cache.moved_bytes[Tier.CPU, Tier.HBM] += bytes_
        cache.moved_seconds[Tier.CPU, Tier.HBM] += seconds
        cache.fetched[Outcome.LATE] += 16
        cache.choices[Tier.NVME, Choice.LOAD] += 1
        cache.ready_seconds.append(0.002)
        metrics.publish(cache)
    value = registry.get_sample_value
    up = {"from": "cpu", "to": "hbm"}
    assert value("sglang_ext_moved_bytes_total", up) == 400
    assert value("sglang_ext_moved_seconds_total", up) == 0.75
    assert value("sglang_ext_fetched_tokens_total", {"outcome": "late"}) == 32
    assert value("sglang_ext_load_choices_total", {"tier": "nvme", "outcome": "load"}) == 2
    assert value("sglang_ext_fetch_ready_seconds_count") == 2


def test_bytes_are_those_of_all_ranks_and_their_time_is_kept(registry: CollectorRegistry) -> None:
    disk = {A: 1000}
    store = SimpleNamespace(
        counters=dict,
        bytes_per_token=100,
        backend=SimpleNamespace(config=SimpleNamespace(caps=SimpleNamespace(total_bytes=1050))),
        remote=None,
        held_bytes=lambda: disk,
    )
    cache = a_cache(store=store)
    cache.ledger.book(A, Tier.CPU, 8, 0)
    cache.token_time.settle(cache.ledger.changed, cache.ledger.tokens, 0)
    metrics = TierMetrics(5)
    for now_ms in (0, 1000, 3000):
        cache.clock.now_ms = now_ms
        metrics.publish(cache)
    value = registry.get_sample_value
    where = {tier: {"owner": "t:a", "tier": tier} for tier in ("cpu", "nvme")}
    assert value("sglang_ext_held_bytes", where["cpu"]) == 8 * 10 * 2
    assert value("sglang_ext_held_bytes", where["nvme"]) == 2000
    assert value("sglang_ext_token_seconds_total", where["cpu"]) == 24
    assert value("sglang_ext_token_seconds_total", where["nvme"]) == 30
    disk.clear()
    for now_ms in (4000, 9000):
        cache.clock.now_ms = now_ms
        metrics.publish(cache)
    assert value("sglang_ext_token_seconds_total", where["nvme"]) == 40


def _store(**counts: int) -> SimpleNamespace:
    caps = SimpleNamespace(caps=SimpleNamespace(total_bytes=1000))
    return SimpleNamespace(
        counters=lambda: counts,
        bytes_per_token=100,
        backend=SimpleNamespace(config=caps),
        remote=None,
        held_bytes=dict,
    )


def test_losses_are_there_before_the_first_and_bytes_apart(registry: CollectorRegistry) -> None:
    """An alert sees no increment of a series that begins with it."""
    TierMetrics(5).publish(a_cache(store=_store(stored=2, stored_bytes=500)))
    value = registry.get_sample_value
    for event in ("corrupt", "truncated", "not_a_page", "io_error", "no_space"):
        assert value("sglang_ext_store_events_total", {"event": event}) == 0
    assert value("sglang_ext_store_events_total", {"event": "stored"}) == 2
    assert value("sglang_ext_store_events_total", {"event": "stored_bytes"}) is None
    assert value("sglang_ext_store_bytes_total", {"event": "stored"}) == 500


def test_the_bill_gets_the_token_seconds_that_the_metrics_show(registry: CollectorRegistry) -> None:
    recorder = UsageRecorder(UsageStore(Path(":memory:")), clock=lambda: 0.0)
    cache = a_cache()
    cache.ledger.book(A, Tier.HBM, 8, 0)
    cache.token_time.settle(cache.ledger.changed, cache.ledger.tokens, 0)
    metrics = TierMetrics(5, HeldUsage(recorder, lambda: 0.0))
    for now_ms in (0, 1000, 3000):
        cache.clock.now_ms = now_ms
        metrics.publish(cache)
    assert recorder.flush()
    ((cell, amounts),) = recorder.read(0, 1)
    assert (cell.tenant, amounts["hbm_token_seconds"]) == ("a", 24)
    labels = {"owner": "t:a", "tier": "hbm"}
    assert registry.get_sample_value("sglang_ext_token_seconds_total", labels) == 24


@given(st.lists(st.floats(-1e6, 1e6), max_size=30))
def test_a_counter_never_gets_less_than_nothing(steps: list[float]) -> None:
    """Where a total falls, since its clock or its store began anew, it counts from there."""
    metrics = TierMetrics.__new__(TierMetrics)
    metrics._seen = {}
    total, counted = 0.0, 0.0
    for step in steps:
        total += step
        counted += sum(grown for _, grown in metrics._news("area", {"a": total}))
        assert all(grown > 0 for _, grown in metrics._news("b", {"a": total}))
    assert counted == pytest.approx(sum(step for step in steps if step > 0), abs=1e-3)
    assert metrics._news("area", {"a": total}) == []

"""Pages age on SGLang's own caches and pools, step by step, with every invariant checked."""

from typing import Any

import pytest

from sglang_ext.radix.order import Reason
from sglang_ext.radix.victims import Eviction
from sglang_ext.residency import lifetimes
from sglang_ext.tenancy.loader import parse_policy
from sglang_ext.tiering.placement import Lifetime
from sglang_ext.types import Owner, Tier
from tests.radix.caches import make_rig
from tests.sglang_ext.tiered import HBM, PAGE, TieredRig, tiered

STRICT = Lifetime(hbm_ms=1000, cpu_ms=5000, nvme_ms=60_000, strict=True)
LAZY = Lifetime(hbm_ms=1000, cpu_ms=5000, nvme_ms=60_000)
LONG = Lifetime(hbm_ms=10**9, cpu_ms=10**9, nvme_ms=10**9)

A = list(range(16))
B = list(range(100, 116))


def held(rig: TieredRig, owner: str = "t:a") -> tuple[int, int]:
    """Return the tokens of an owner in HBM and CPU; looking is no use."""
    ledger = rig.cache.ledger
    return tuple(ledger.usage(Owner(owner), tier).tokens for tier in (Tier.HBM, Tier.CPU))


def test_strict_pages_move_down_at_their_time_and_not_before() -> None:
    with tiered() as rig:
        rig.age({"t:a": STRICT})
        rig.write(A)
        rig.later(999)
        assert held(rig) == (16, 16)
        rig.later(101)
        assert held(rig) == (0, 16)
        rig.later(3900)
        assert held(rig) == (0, 0)
        assert rig.cache.evictions[Eviction(Owner("t:a"), Tier.HBM, Reason.TTL)] == 16
        assert rig.cache.evictions[Eviction(Owner("t:a"), Tier.CPU, Reason.TTL)] == 16


def test_a_use_begins_a_new_life() -> None:
    with tiered() as rig:
        rig.age({"t:a": STRICT})
        rig.write(A)
        for _ in range(5):
            rig.later(900)
            assert rig.where(A) == (16, 0)


def test_a_whole_path_goes_leaf_by_leaf_and_only_its_old_part() -> None:
    with tiered() as rig:
        rig.age({"t:a": STRICT})
        rig.write([*A, *B])
        rig.write([*A, *range(200, 208)])
        rig.later(600)
        assert rig.where(A) == (16, 0)
        rig.later(500)
        assert held(rig) == (16, 40)
        rig.later(600)
        assert held(rig) == (0, 40)


def test_strict_pages_without_a_copy_below_get_one_first() -> None:
    with tiered() as rig:
        rig.age({"t:a": STRICT})
        rig.cache.write_through_threshold = 10**9
        rig.write(A)
        assert held(rig) == (16, 0)
        rig.later(1000)
        assert held(rig) == (16, 16)
        rig.later(100)
        assert held(rig) == (0, 16)


def test_a_locked_page_stays_until_it_is_released() -> None:
    with tiered() as rig:
        rig.age({"t:a": STRICT})
        rig.write(A)
        lock = rig.cache.lock(rig.match(A).last_device_node)
        rig.later(5000)
        assert held(rig) == (16, 16)
        rig.cache.unlock(lock)
        rig.later(100)
        assert held(rig)[0] == 0


def test_lazy_pages_stay_while_nobody_needs_the_room_and_are_the_first_to_go() -> None:
    """The newer page of an owner with little goes before the older one of an owner with much."""
    with tiered() as rig:
        rig.age({"t:a": LONG, "t:b": LAZY})
        rig.write(A, "t:a")
        rig.write(B, "t:b")
        rig.later(1000)
        assert held(rig, "t:b") == (16, 16)
        rig.evict(16)
        rig.settle()
        assert (held(rig, "t:a"), held(rig, "t:b")) == ((16, 16), (0, 16))
        assert rig.cache.evictions[Eviction(Owner("t:b"), Tier.HBM, Reason.TTL)] == 16


def test_expired_host_pages_are_the_first_to_go_from_the_cpu_tier() -> None:
    with tiered() as rig:
        rig.age({"t:a": LONG, "t:b": LAZY})
        rig.write(A, "t:a")
        rig.write(B, "t:b")
        rig.evict(32)
        rig.later(5000)
        rig.cache.evict_host(PAGE)
        rig.settle()
        assert (held(rig, "t:a"), held(rig, "t:b")) == ((0, 16), (0, 0))


def test_what_was_used_since_the_last_round_is_no_longer_expired() -> None:
    with tiered() as rig:
        rig.age({"t:a": LONG, "t:b": LAZY})
        rig.write(A, "t:a")
        rig.write(B, "t:b")
        rig.later(1000)
        assert rig.where(B, "t:b") == (16, 0)
        rig.evict(16)
        rig.settle()
        assert (held(rig, "t:a")[0], held(rig, "t:b")[0]) == (0, 16)


def test_hbm_is_freed_ahead_of_need_below_the_watermark() -> None:
    with tiered() as rig:
        rig.age({"t:a": LONG}, watermark=24)
        for start in range(0, 64, 16):
            rig.write(list(range(1000 + start, 1016 + start)))
        assert rig.allocator.available_size() == HBM - 64
        rig.later(100)
        assert rig.allocator.available_size() >= 24
        assert held(rig)[1] == 64


def test_without_a_tier_below_strict_pages_are_dropped_and_the_watermark_is_not_kept() -> None:
    rig = TieredRig(make_rig(64, PAGE).cache)
    rig.age({"t:a": STRICT, "t:b": LONG}, watermark=64)
    rig.insert(A, "t:a")
    rig.insert(B, "t:b")
    rig.later(1000)
    assert (held(rig, "t:a"), held(rig, "t:b")) == ((0, 0), (16, 0))


def test_public_text_and_unknown_owners_do_not_age() -> None:
    with tiered(public=[A]) as rig:
        rig.age({"t:a": STRICT})
        rig.write([*A, *B], "t:a")
        rig.write(B, "t:gone")
        rig.later(10**6)
        assert held(rig, "t:a") == (0, 0)
        assert held(rig, "") == held(rig, "t:gone") == (16, 16)


def test_rounds_are_ten_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    with tiered() as rig:
        rig.age({"t:a": STRICT})
        rounds: list[Any] = []
        monkeypatch.setattr(rig.cache.residency, "_age", rounds.append)
        for _ in range(20):
            rig.later(10)
        assert rounds == [Tier.HBM, Tier.CPU] * 2


def test_a_flush_leaves_nothing_to_age() -> None:
    with tiered() as rig:
        rig.age({"t:a": STRICT})
        rig.write(A)
        rig.cache.reset()
        rig.allocator.clear()
        rig.later(10**6)
        rig.write(A)
        rig.later(1000)
        assert held(rig) == (0, 16)


def test_the_policy_says_how_long_each_owner_keeps_its_pages() -> None:
    policy = parse_policy(
        "version: 1\n"
        "defaults: {ttl: {cpu: 2m}}\n"
        "tenants:\n"
        "  a: {ttl: {hbm: 250ms, mode: strict}}\n"
        "  b: {isolation: shared, group: g}\n"
        "  c: {isolation: shared, group: g}\n"
    )
    found = lifetimes(policy)
    week = 7 * 24 * 3600 * 1000
    assert found[Owner("t:a")] == Lifetime(hbm_ms=250, cpu_ms=120_000, nvme_ms=week, strict=True)
    assert found[Owner("g:g")] == Lifetime(hbm_ms=30_000, cpu_ms=120_000, nvme_ms=week)

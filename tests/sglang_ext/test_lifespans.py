"""Pages that end at a time of their own (trials 20 and 38), step by step on SGLang's own caches."""

from pathlib import Path
from typing import Any

import pytest

from sglang_ext.lifespans import Lifespans
from sglang_ext.radix.integrity import check_integrity
from sglang_ext.radix.order import Reason
from sglang_ext.radix.victims import Eviction
from sglang_ext.tiering.placement import Lifetime
from sglang_ext.tiering.transfers import PageRef
from sglang_ext.types import Owner, Tier
from tests.radix.caches import make_rig
from tests.sglang_ext.tiered import PAGE, TieredRig, tiered

A = list(range(16))
B = list(range(100, 116))
LAZY = Lifetime(hbm_ms=1000, cpu_ms=5000, nvme_ms=60_000)
FIXED = Lifetime(hbm_ms=1000, cpu_ms=5000, nvme_ms=60_000, fixed=True)
STRICT_FIXED = Lifetime(hbm_ms=1000, cpu_ms=5000, nvme_ms=60_000, fixed=True, strict=True)


def begin(rig: TieredRig, lives: dict[str, Lifetime], wall: Any = None) -> None:
    """Let pages of these owners age and end; the disk's clock is the rig's."""
    found = {Owner(owner): life for owner, life in lives.items()}
    wall = wall or (lambda: rig.time.now / 1000)
    rig.age(lives, wall_clock=wall)
    rig.cache.lifespans = Lifespans(rig.cache, found, wall)


def ask(rig: TieredRig, tokens: list[int], owner: str = "t:a", ttl_ms: int | None = None) -> int:
    """Send a request for a text; return how many of its tokens were cached in memory."""
    found = rig.match(tokens, owner)
    if found.host_hit_length:
        assert rig.cache.load_back(found.best_match_node)
        rig.cache.ready_to_load_host_cache()
        rig.settle()
    rig.insert(tokens, owner)
    node = rig.core.node_by_id(rig.match(tokens, owner).last_device_node)
    rig.cache.lifespans.used(node, Owner(owner), ttl_ms)
    rig.settle()
    return int(found.device_prefix_len + found.host_hit_length)


def held(rig: TieredRig, owner: str = "t:a") -> tuple[int, int]:
    ledger = rig.cache.ledger
    return tuple(ledger.usage(Owner(owner), tier).tokens for tier in (Tier.HBM, Tier.CPU))


@pytest.mark.trial(20)
@pytest.mark.trial(38)
def test_a_fixed_life_ends_under_constant_use_and_one_since_the_last_use_does_not() -> None:
    rig = TieredRig(make_rig(64, PAGE).cache)
    begin(rig, {"t:a": FIXED, "t:b": LAZY})
    hits: dict[str, list[int]] = {"t:a": [], "t:b": []}
    for _ in range(12):
        for owner, cached in hits.items():
            cached.append(ask(rig, A, owner))
        rig.later(100)
    assert hits["t:b"] == [0, *[16] * 11]
    assert hits["t:a"] == [0, *[16] * 9, 0, 16], "it ended after its second, and a new life began"
    assert rig.cache.evictions[Eviction(Owner("t:a"), Tier.HBM, Reason.TTL)] == 16


@pytest.mark.trial(20)
def test_a_strict_fixed_page_leaves_each_tier_at_its_own_time_though_it_is_used() -> None:
    with tiered() as rig:
        begin(rig, {"t:a": STRICT_FIXED})
        places = []
        for _ in range(56):
            rig.match(A)
            rig.later(100)
            places.append(held(rig))
        assert places == [(0, 0)] * 56
        ask(rig, A)
        assert held(rig) == (16, 16)
        rig.later(900)
        assert held(rig) == (16, 16)
        rig.later(100)
        assert held(rig) == (0, 16)
        assert ask(rig, A) == 16
        assert held(rig) == (16, 16), "it was loaded back to be used"
        rig.later(100)
        assert held(rig) == (0, 16)
        for _ in range(38):
            rig.later(100)
            rig.match(A)
        assert held(rig) == (0, 16)
        rig.later(100)
        assert held(rig) == (0, 0)


def test_what_continues_a_page_with_a_fixed_life_ends_with_it() -> None:
    rig = TieredRig(make_rig(64, PAGE).cache)
    begin(rig, {"t:a": FIXED})
    ask(rig, A)
    rig.later(900)
    ask(rig, [*A, *B])
    assert held(rig)[0] == 32
    rig.later(100)
    assert held(rig)[0] == 0


def test_a_page_in_use_ends_when_it_is_released() -> None:
    rig = TieredRig(make_rig(64, PAGE).cache)
    begin(rig, {"t:a": FIXED})
    ask(rig, A)
    lock = rig.cache.lock(rig.match(A).last_device_node)
    rig.later(2000)
    assert held(rig)[0] == 16
    rig.cache.unlock(lock)
    rig.later(100)
    assert held(rig)[0] == 0


@pytest.mark.trial(20)
@pytest.mark.trial(38)
def test_a_client_shortens_the_life_of_its_pages_and_each_use_begins_it_anew() -> None:
    with tiered() as rig:
        begin(rig, {"t:a": LAZY})
        ask(rig, A, ttl_ms=300)
        ask(rig, B)
        for _ in range(3):
            rig.later(200)
            assert ask(rig, A, ttl_ms=300) == 16
        rig.later(300)
        assert held(rig) == (16, 16), "only the other text is left"
        assert ask(rig, A) == 0


@pytest.mark.trial(20)
def test_a_client_cannot_lengthen_a_life() -> None:
    with tiered() as rig:
        begin(rig, {"t:a": Lifetime(hbm_ms=100, cpu_ms=500, nvme_ms=500, strict=True)})
        ask(rig, A, ttl_ms=10**9)
        rig.later(500)
        rig.later(100)
        assert held(rig) == (0, 0)


def test_the_last_request_that_used_a_page_says_how_long_it_stays() -> None:
    rig = TieredRig(make_rig(64, PAGE).cache)
    begin(rig, {"t:a": LAZY})
    ask(rig, A, ttl_ms=300)
    ask(rig, A)
    rig.later(10_000)
    assert held(rig)[0] == 16
    ask(rig, A, ttl_ms=300)
    rig.later(300)
    assert held(rig)[0] == 0


def test_a_prefix_that_others_continue_waits_for_them() -> None:
    rig = TieredRig(make_rig(64, PAGE).cache)
    begin(rig, {"t:a": LAZY})
    ask(rig, [*A, *B])
    ask(rig, A, ttl_ms=300)
    rig.later(1000)
    assert held(rig)[0] == 32
    rig.evict(16)
    rig.later(300)
    assert held(rig)[0] == 0


def test_a_chain_of_short_lives_ends_in_one_round() -> None:
    rig = TieredRig(make_rig(64, PAGE).cache)
    begin(rig, {"t:a": LAZY})
    ask(rig, A[:4], ttl_ms=300)
    ask(rig, A[:8], ttl_ms=300)
    ask(rig, A, ttl_ms=300)
    ask(rig, [*A[:8], *B], ttl_ms=300)
    rig.later(300)
    assert held(rig)[0] == 0


def test_a_split_gives_both_parts_the_same_end() -> None:
    rig = TieredRig(make_rig(64, PAGE).cache)
    begin(rig, {"t:a": FIXED})
    ask(rig, A)
    rig.later(500)
    rig.insert([*A[:8], *B])
    rig.later(400)
    assert held(rig)[0] == 32
    rig.later(100)
    assert held(rig)[0] == 0, "the request that split it has not ended, and counts for nothing"


def test_public_text_never_ends() -> None:
    rig = TieredRig(make_rig(64, PAGE, [A]).cache)
    begin(rig, {"t:a": FIXED})
    ask(rig, [*A, *B], ttl_ms=100)
    rig.later(10_000)
    assert (held(rig, "")[0], held(rig)[0]) == (16, 0)


@pytest.mark.trial(20)
def test_pages_with_a_shorter_life_do_not_reach_the_disk(tmp_path: Path) -> None:
    with tiered(tmp_path) as rig:
        begin(rig, {"t:a": LAZY})
        store = rig.cache.store
        assert store is not None
        ask(rig, A)
        assert store.held_bytes()
        ask(rig, A, ttl_ms=300)
        rig.later(300)
        assert not store.held_bytes(), "what lay there from an earlier request went with it"
        ask(rig, A, ttl_ms=300)
        assert held(rig) == (16, 16)
        assert not store.held_bytes()


def test_a_life_as_long_as_the_policys_changes_nothing(tmp_path: Path) -> None:
    with tiered(tmp_path) as rig:
        begin(rig, {"t:a": LAZY})
        ask(rig, A, ttl_ms=60_000)
        assert rig.cache.store is not None
        assert rig.cache.store.held_bytes(), "it is kept from the disk"
        assert len(rig.cache.deadlines) == 0


def test_a_page_that_left_memory_early_leaves_the_disk_too(tmp_path: Path) -> None:
    with tiered(tmp_path) as rig:
        begin(rig, {"t:a": LAZY})
        store = rig.cache.store
        assert store is not None
        ask(rig, A)
        ask(rig, A, ttl_ms=300)
        rig.evict(64)
        rig.cache.evict_host(128)
        rig.settle()
        assert store.held_bytes()
        rig.later(100)
        assert not store.held_bytes()


def test_the_disk_keeps_the_age_of_pages_with_a_fixed_life(tmp_path: Path) -> None:
    """A page that comes back from the disk does not begin a new life."""
    with tiered(tmp_path) as rig:
        begin(rig, {"t:a": FIXED})
        store = rig.cache.store
        assert store is not None
        backend = store.backend.store
        backend.keep_age([Owner("t:a")])
        ask(rig, A)
        first = rig.core.node_by_id(rig.match(A).last_device_node)
        page = first.hash_value[0]
        assert store.written(Owner("t:a"), page) is not None
        begun = backend.last_access(PageRef(Owner("t:a"), bytes.fromhex(page)))
        rig.cache.lifespans._wall_clock = lambda: begun + 59.0  # type: ignore[operator]
        rig.evict(64)
        rig.cache.evict_host(128)
        rig.settle()
        assert held(rig) == (0, 0)
        ask(rig, A)
        assert store.written(Owner("t:a"), page) == begun, "a use does not renew it"
        rig.later(900)
        assert held(rig)[0] == 16
        rig.later(100)
        assert held(rig) == (0, 0), "59 seconds old when it came back, and one more"
        assert not store.held_bytes()


def test_entries_do_not_outlive_their_pages() -> None:
    rig = TieredRig(make_rig(64, PAGE).cache)
    begin(rig, {"t:a": Lifetime(hbm_ms=10**9, cpu_ms=10**9, nvme_ms=10**9, fixed=True)})
    for number in range(500):
        ask(rig, list(range(1000 * number, 1000 * number + 16)))
        check_integrity(rig.cache)
    assert len(rig.cache.deadlines) <= 2 * 5
    rig.cache.reset()
    rig.allocator.clear()
    assert len(rig.cache.deadlines) == 0


def test_a_round_looks_only_at_what_may_be_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is judged once in its lifetime, however often it is used."""
    rig = TieredRig(make_rig(512, PAGE).cache)
    begin(rig, {"t:a": LAZY})
    for number in range(20):
        ask(rig, list(range(100 * number, 100 * number + 16)), ttl_ms=500)
    judged: list[Any] = []
    judge = Lifespans._judge
    monkeypatch.setattr(
        Lifespans, "_judge", lambda *args: (judged.append(args[1]), judge(*args))[1]
    )
    for _ in range(4):
        rig.later(100)
        ask(rig, list(range(16)), ttl_ms=500)
    assert judged == []
    rig.later(100)
    assert len(judged) == 20, "all had an entry, and one was used since"
    assert held(rig)[0] == 16
    for _ in range(3):
        rig.later(100)
    assert len(judged) == 20

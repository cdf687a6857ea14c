"""The store never takes more than it may, and takes from the right owner first."""

import random
from pathlib import Path

import pytest

from sglang_ext.tiering.caps import Caps, Limit, furthest_above_share
from sglang_ext.types import Owner
from tests.tiering.stores import (
    ALICE,
    BOB,
    SLOT_BYTES,
    FakeClock,
    check_books,
    disk_bytes,
    get,
    make_store,
    put,
    refs_of,
    slab_files,
)

CAROL = Owner("t:carol")
ROUNDING = 8192
"""Blocks of a file that are not pages: the tree of its extents."""


@pytest.mark.trial(57)
@pytest.mark.trial(60)
@pytest.mark.trial(73)
def test_du_stays_under_the_cap_and_equals_the_books(tmp_path: Path) -> None:
    store = make_store(tmp_path, total=100 * SLOT_BYTES)
    for start in range(0, 500, 25):
        assert all(put(store, refs_of(ALICE, range(start, start + 25))))
        check_books(store, tmp_path, 100 * SLOT_BYTES)
    assert store.counters["evicted"] >= 400
    assert all(get(store, refs_of(ALICE, range(475, 500))))
    store.check_integrity()
    store.close()


@pytest.mark.trial(57)
def test_a_full_folder_opened_with_a_smaller_cap_shrinks(tmp_path: Path) -> None:
    with_room = make_store(tmp_path, total=100 * SLOT_BYTES)
    put(with_room, refs_of(ALICE, range(90)))
    with_room.close()
    store = make_store(tmp_path, total=40 * SLOT_BYTES)
    assert store.total_usage().total <= 40 * SLOT_BYTES
    assert disk_bytes(tmp_path) <= 40 * SLOT_BYTES + ROUNDING * len(slab_files(tmp_path))
    assert put(store, refs_of(ALICE, [1000])) == [True]
    store.check_integrity()
    store.close()


def test_mixed_page_sizes_keep_the_cap(tmp_path: Path) -> None:
    total = 64 * SLOT_BYTES
    store = make_store(tmp_path, total=total)
    dice = random.Random(5)
    for number in range(300):
        put(store, refs_of(ALICE, [number]), dice.choice([100, 9000, 30_000, 120_000]))
        check_books(store, tmp_path, total)
    store.check_integrity()
    store.close()


def test_reserved_room_is_given_up_before_pages_are(tmp_path: Path) -> None:
    store = make_store(tmp_path, total=64 * SLOT_BYTES)
    put(store, refs_of(ALICE, [1]))
    assert store.total_usage().idle > 0
    large = 9 * 4096  # a slot of a page of 30,000 bytes
    for number in range((64 * SLOT_BYTES - SLOT_BYTES) // large):
        assert put(store, refs_of(BOB, [number]), size=30_000) == [True]
    assert "evicted" not in store.counters
    store.check_integrity()
    store.close()


@pytest.mark.parametrize("restart", [False, True])
def test_least_recently_used_goes_first_and_paths_lose_their_end(
    tmp_path: Path, restart: bool
) -> None:
    clock = FakeClock()
    store = make_store(tmp_path, total=10 * SLOT_BYTES, clock=clock)
    refs = refs_of(ALICE, range(10))
    put(store, refs)
    clock.now += 1000
    get(store, refs[:3])
    if restart:
        store.close()
        store = make_store(tmp_path, total=10 * SLOT_BYTES, clock=clock)
    put(store, refs_of(ALICE, range(10, 14)))
    assert store.contains_batch(refs) == [True] * 6 + [False] * 4
    put(store, refs_of(ALICE, range(14, 18)))
    assert store.contains_batch(refs) == [True] * 2 + [False] * 8
    store.close()


def test_a_hard_quota_is_never_exceeded(tmp_path: Path) -> None:
    limits = {ALICE: Limit(quota_bytes=5 * SLOT_BYTES, hard=True)}
    store = make_store(tmp_path, caps=Caps(total_bytes=100 * SLOT_BYTES, limits=limits))
    for start in range(0, 40, 8):
        put(store, refs_of(ALICE, range(start, start + 8)))
        assert store.usage(ALICE) <= 5 * SLOT_BYTES
    put(store, refs_of(BOB, range(20)))
    assert store.usage(BOB) == 20 * SLOT_BYTES
    store.close()


def test_a_soft_quota_borrows_what_is_idle_and_gives_it_back_first(tmp_path: Path) -> None:
    limits = {
        ALICE: Limit(quota_bytes=10 * SLOT_BYTES),
        BOB: Limit(quota_bytes=90 * SLOT_BYTES),
    }
    store = make_store(tmp_path, caps=Caps(total_bytes=100 * SLOT_BYTES, limits=limits))
    put(store, refs_of(ALICE, range(60)))
    assert store.usage(ALICE) == 60 * SLOT_BYTES
    bob = refs_of(BOB, range(90))
    assert all(put(store, bob))
    assert store.usage(ALICE) == 10 * SLOT_BYTES
    assert all(get(store, bob))
    store.close()


def test_a_reserve_is_not_taken_for_another_owner(tmp_path: Path) -> None:
    limits = {ALICE: Limit(quota_bytes=0, reserve_bytes=4 * SLOT_BYTES)}
    store = make_store(tmp_path, caps=Caps(total_bytes=20 * SLOT_BYTES, limits=limits))
    put(store, refs_of(ALICE, range(4)))
    put(store, refs_of(BOB, range(50)))
    assert store.usage(ALICE) == 4 * SLOT_BYTES
    assert all(get(store, refs_of(ALICE, range(4))))
    store.close()


def test_a_cap_below_the_reserves_wins(tmp_path: Path) -> None:
    limits = {owner: Limit(reserve_bytes=10 * SLOT_BYTES) for owner in (ALICE, BOB)}
    store = make_store(tmp_path, caps=Caps(total_bytes=20 * SLOT_BYTES, limits=limits))
    for owner in (ALICE, BOB):
        put(store, refs_of(owner, range(10)))
    store.set_caps(Caps(total_bytes=6 * SLOT_BYTES, limits=limits))
    assert store.total_usage().total <= 6 * SLOT_BYTES
    store.check_integrity()
    store.close()


def test_lowered_caps_evict_at_once(tmp_path: Path) -> None:
    store = make_store(tmp_path, total=50 * SLOT_BYTES)
    put(store, refs_of(ALICE, range(40)))
    limits = {ALICE: Limit(quota_bytes=7 * SLOT_BYTES, hard=True)}
    store.set_caps(Caps(total_bytes=50 * SLOT_BYTES, limits=limits))
    assert store.usage(ALICE) == 7 * SLOT_BYTES
    store.set_caps(Caps(total_bytes=3 * SLOT_BYTES))
    assert store.total_usage().total <= 3 * SLOT_BYTES
    assert put(store, refs_of(BOB, range(100, 103))) == [True] * 3
    store.check_integrity()
    store.close()


def test_a_page_above_the_cap_is_refused_and_counted(tmp_path: Path) -> None:
    limits = {BOB: Limit(quota_bytes=0, hard=True)}
    store = make_store(tmp_path, caps=Caps(total_bytes=4 * SLOT_BYTES, limits=limits))
    put(store, refs_of(ALICE, range(4)))
    assert put(store, refs_of(ALICE, [9]), size=5 * SLOT_BYTES) == [False]
    assert put(store, refs_of(BOB, [9])) == [False]
    assert store.counters["over_cap"] == 2
    assert all(get(store, refs_of(ALICE, range(4))))
    store.close()


def test_order_of_victims() -> None:
    caps = Caps(
        total_bytes=300,
        limits={ALICE: Limit(quota_bytes=10), CAROL: Limit(quota_bytes=50, reserve_bytes=60)},
    )
    usage = {ALICE: 100, BOB: 150, CAROL: 50}
    # Alice is 90 above her quota, Bob 50 above a third, Carol inside her reserve.
    assert furthest_above_share(usage, caps, BOB) == [ALICE, BOB]
    assert furthest_above_share(usage, caps, CAROL) == [ALICE, BOB, CAROL]


def test_no_folder_holds_more_than_4096_entries(tmp_path: Path) -> None:
    store = make_store(tmp_path, total=2000 * SLOT_BYTES)
    for start in range(0, 6000, 1000):
        put(store, refs_of(ALICE, range(start, start + 1000)), size=100)
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert max(len(list(folder.iterdir())) for folder in folders) <= 4096
    assert len(store.counters) > 0
    store.close()

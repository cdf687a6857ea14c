"""A shared store that is dead, slow, full or damaged: misses, counters, and it comes back."""

import threading
from collections.abc import Callable, Iterator

import pytest

from sglang_ext.tiering.page_format import HEADER_BYTES
from sglang_ext.tiering.remote_memory import MemoryObjects, Shelf
from sglang_ext.tiering.remote_names import held_pages
from sglang_ext.tiering.remote_store import RemoteStore
from sglang_ext.tiering.transfers import copy_into
from tests.mooncake import await_that
from tests.tiering.remotes import make_remote
from tests.tiering.stores import ALICE, BOB, BODY_BYTES, FakeClock, get, put, refs_of

REFS = refs_of(ALICE, range(6))


class Side:
    """One machine of a test."""

    def __init__(self, shelf: Shelf, **options: object) -> None:
        self.clock = FakeClock()
        self.store: RemoteStore = make_remote(
            MemoryObjects(shelf),
            clock=self.clock,
            page_bytes=BODY_BYTES,
            **options,  # type: ignore[arg-type]
        )

    def retry(self) -> None:
        """Let the pause after a failure be over, and ask again."""
        self.store._link.breaker._until = 0.0
        self.store.refresh()


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def sides(shelf: Shelf) -> Iterator[Callable[..., Side]]:
    opened: list[Side] = []

    def make(**options: object) -> Side:
        opened.append(Side(shelf, **options))
        return opened[-1]

    yield make
    shelf.silent = False
    if shelf.gate is not None:
        shelf.gate.set()
    for side in opened:
        side.store.check_integrity()
        side.store.close()


def test_one_machine_finds_what_another_wrote(sides: Callable[..., Side]) -> None:
    a, b = sides(), sides()
    assert all(put(a.store, REFS))
    assert b.store.contains_batch(REFS) == [True] * 6
    assert all(get(b.store, REFS))
    assert not any(get(b.store, refs_of(BOB, range(6))))


def test_what_is_there_is_not_written_twice(shelf: Shelf, sides: Callable[..., Side]) -> None:
    a, b = sides(), sides()
    put(a.store, REFS[:4])
    before = shelf.transfers
    assert put(b.store, REFS) == [True] * 6
    assert shelf.transfers - before == 2
    assert b.store.counters["already_there"] == 4
    b.store.refresh()
    assert b.store.usage(ALICE) == 6 * b.store.config.slot_bytes


def test_a_silent_store_is_left_alone_and_used_again_when_it_answers(
    shelf: Shelf, sides: Callable[..., Side]
) -> None:
    side = sides()
    put(side.store, REFS[:3])
    shelf.silent = True
    assert get(side.store, REFS[:3]) == [False] * 3
    assert not side.store.answers
    silent = side.store.counters["silent"]
    shelf.silent = False
    assert get(side.store, REFS[:3]) == [False] * 3, "nobody asks during the pause"
    assert put(side.store, REFS[3:]) == [False] * 3
    assert side.store.counters["silent"] == silent
    side.retry()
    assert get(side.store, REFS[:3]) == [True] * 3
    assert put(side.store, REFS) == [True] * 6


def test_a_store_that_is_silent_at_the_start_is_used_later(
    shelf: Shelf, sides: Callable[..., Side]
) -> None:
    shelf.silent = True
    side = sides()
    assert put(side.store, REFS) == [False] * 6
    shelf.silent = False
    side.retry()
    assert put(side.store, REFS) == [True] * 6


def test_the_store_comes_back_by_itself(shelf: Shelf) -> None:
    config = make_remote(MemoryObjects(shelf)).config
    shelf.silent = True
    store = RemoteStore(config, MemoryObjects(shelf))
    store.start()
    try:
        assert not store.answers
        shelf.silent = False
        back = threading.Event()
        while not store.answers:
            back.wait(0.01)
        assert put(store, REFS) == [True] * 6
    finally:
        store.close()


def test_a_slow_link_ends_at_the_deadline_and_touches_nothing_later(
    shelf: Shelf, sides: Callable[..., Side]
) -> None:
    side = sides(timeout_s=0.05)
    put(side.store, REFS)
    shelf.gate = threading.Event()
    buffers = [bytearray(BODY_BYTES) for _ in REFS]
    found = side.store.get_batch(REFS, copy_into([memoryview(each) for each in buffers]))
    assert found == [False] * 6
    assert side.store.counters["timeout"] == 6
    assert not side.store.answers, "nobody else waits for it"
    shelf.gate.set()
    shelf.gate = None
    side.retry()
    assert get(side.store, REFS) == [True] * 6
    assert buffers == [bytearray(BODY_BYTES)] * 6


def test_a_write_that_ends_after_its_owner_was_deleted_leaves_nothing(
    shelf: Shelf, sides: Callable[..., Side]
) -> None:
    a, b = sides(timeout_s=0.05), sides()
    gate = shelf.gate = threading.Event()
    assert put(a.store, REFS) == [False] * 6
    shelf.gate = None
    a.retry()
    a.store.delete_owner(ALICE)
    gate.set()
    a.store._link.timeout_s = 30.0
    assert a.store._link.stop()
    assert not any(get(b.store, REFS))
    assert not list(held_pages(shelf.objects))


def test_a_full_store_refuses_and_keeps_what_it_has(
    shelf: Shelf, sides: Callable[..., Side]
) -> None:
    side = sides()
    put(side.store, REFS[:3])
    shelf.capacity_bytes, shelf.evicts = 3 * (HEADER_BYTES + BODY_BYTES), False
    assert put(side.store, REFS[3:]) == [False] * 3
    assert side.store.counters["full"] == 3
    assert side.store.answers
    assert get(side.store, REFS[:3]) == [True] * 3


def test_what_the_store_dropped_by_itself_is_a_miss_and_leaves_the_books(
    shelf: Shelf, sides: Callable[..., Side]
) -> None:
    side = sides()
    put(side.store, REFS)
    side.clock.now += 1
    shelf.objects.clear()
    assert get(side.store, REFS) == [False] * 6
    assert side.store.usage(ALICE) > 0
    side.store.refresh()
    assert side.store.usage(ALICE) == 0


def test_a_lost_peer_is_a_miss(shelf: Shelf, sides: Callable[..., Side]) -> None:
    side = sides()
    put(side.store, REFS)
    shelf.lost = set(shelf.objects)
    assert not any(get(side.store, REFS))
    assert side.store.counters["lost"] >= 1
    shelf.lost = set()
    side.retry()
    assert all(get(side.store, REFS))


@pytest.mark.trial(67)
@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("offset", [0, 20, 100, HEADER_BYTES, HEADER_BYTES + BODY_BYTES - 1])
def test_a_flipped_bit_is_a_miss_and_the_page_goes(
    shelf: Shelf, sides: Callable[..., Side], offset: int, encrypted: bool
) -> None:
    side = sides(encrypted=encrypted)
    put(side.store, REFS[:2])
    (first, *_) = [name for name in shelf.objects if not name.startswith("sgx1-keys")]
    shelf.flip(first, offset)
    found = get(side.store, REFS[:2])
    assert sorted(found) == [False, True]
    assert first not in shelf.objects
    assert put(side.store, REFS[:2]) == [True, True]
    assert get(side.store, REFS[:2]) == [True, True]


@pytest.mark.trial(63)
def test_a_page_in_the_place_of_another_is_refused(
    shelf: Shelf, sides: Callable[..., Side]
) -> None:
    """Whoever can write to the store can move pages between tenants, but not make them readable."""
    side = sides()
    put(side.store, refs_of(ALICE, [1]))
    (name,) = shelf.objects
    shelf.objects[name.replace("alice", "bob")] = shelf.objects[name]
    assert side.store.contains_batch(refs_of(BOB, [1])) == [True]
    assert get(side.store, refs_of(BOB, [1])) == [False]
    assert side.store.counters["other_owner"] == 1


@pytest.mark.parametrize("cut", [0, 10, HEADER_BYTES, HEADER_BYTES + 5])
def test_a_shorter_object_is_a_miss(shelf: Shelf, sides: Callable[..., Side], cut: int) -> None:
    side = sides()
    put(side.store, REFS[:2])
    name = next(iter(shelf.objects))
    shelf.objects[name] = shelf.objects[name][:cut]
    assert sorted(get(side.store, REFS[:2])) == [False, True]


def test_a_deletion_is_owed_while_the_store_is_silent(
    shelf: Shelf, sides: Callable[..., Side]
) -> None:
    side, other = sides(), sides()
    put(side.store, REFS)
    put(side.store, refs_of(BOB, [1]))
    shelf.silent = True
    assert side.store.delete_owner(ALICE) == 0
    assert side.store.counters["deletion_owed"] == 1
    shelf.silent = False
    side.retry()
    assert not any(get(side.store, REFS))
    assert not any(get(other.store, REFS))
    assert all(get(side.store, refs_of(BOB, [1])))
    assert put(side.store, REFS) == [True] * 6, "what comes afterwards is new"


def test_until_then_nothing_of_the_owner_is_used(shelf: Shelf, sides: Callable[..., Side]) -> None:
    side = sides()
    put(side.store, REFS)
    side.store._deletions.owe([ALICE])
    assert get(side.store, REFS) == [False] * 6
    assert put(side.store, REFS) == [False] * 6


def test_pages_are_deleted_without_waiting(shelf: Shelf, sides: Callable[..., Side]) -> None:
    side = sides()
    put(side.store, REFS)
    side.store.delete_soon(REFS[:2])
    await_that(lambda: len(shelf.objects) == 4)
    assert get(side.store, REFS) == [False] * 2 + [True] * 4


def test_a_page_is_good_for_its_lifetime_on_every_machine(
    shelf: Shelf, sides: Callable[..., Side]
) -> None:
    a, b = sides(lifetime_s=lambda owner: 100.0), sides(lifetime_s=lambda owner: 100.0)
    put(a.store, REFS)
    b.clock.now += 99
    assert all(get(b.store, REFS))
    b.clock.now += 2
    assert not any(get(b.store, REFS))
    assert b.store.counters["expired"] == 6
    assert not shelf.objects


def test_owners_that_have_no_copies_get_none(shelf: Shelf, sides: Callable[..., Side]) -> None:
    side = sides(copies=lambda owner: owner == BOB)
    assert put(side.store, [*REFS[:1], *refs_of(BOB, [1])]) == [False, True]
    assert len(shelf.objects) == 1


def test_other_machines_are_told_of_a_deletion(shelf: Shelf, sides: Callable[..., Side]) -> None:
    a, b = sides(), sides()
    put(a.store, REFS)
    a.store.delete_owner(ALICE)
    for side in (a, b):
        side.store.refresh()
        side.store.refresh()
    assert not a.store.notices.news
    assert [(one.owner, one.time) for one in b.store.notices.news] == [(ALICE, a.clock.now)]
    late = sides()
    assert len(late.store.notices.news) == 1, "one that was off meanwhile"
    late.clock.now += 8 * 86400
    late.store.refresh()
    assert not shelf.objects, "old notices go"


def test_they_are_told_too_when_the_store_was_silent(
    shelf: Shelf, sides: Callable[..., Side]
) -> None:
    a, b = sides(), sides()
    shelf.silent = True
    a.store.delete_owner(ALICE)
    shelf.silent = False
    a.retry()
    b.store.refresh()
    assert [one.owner for one in b.store.notices.news] == [ALICE]

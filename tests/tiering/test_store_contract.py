"""What every store of pages must do, on this machine's disk and in a store that machines share."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from sglang_ext.tiering.page_store import PageStore
from sglang_ext.tiering.remote_memory import MemoryObjects, Shelf
from sglang_ext.tiering.remote_mooncake import MooncakeObjects
from sglang_ext.tiering.remote_objects import Objects
from sglang_ext.tiering.transfers import PageRef, copy_into
from sglang_ext.types import PUBLIC, Owner
from tests.mooncake import Cluster, start_cluster
from tests.tiering.remotes import make_remote
from tests.tiering.stores import ALICE, BOB, FakeClock, body_of, get, make_store, put, refs_of

KINDS = ["disk", "memory", "mooncake"]


class Harness:
    """One kind of store: opened, closed and opened again over the same pages."""

    def __init__(self, kind: str, reopen: Callable[[], PageStore], clock: FakeClock) -> None:
        self.kind = kind
        self._reopen = reopen
        self.clock = clock
        self.store = reopen()

    def restart(self) -> PageStore:
        self.store.close()
        self.store = self._reopen()
        return self.store


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = start_cluster(tmp_path_factory.mktemp("mooncake"), 256 * 2**20)
    yield cluster
    cluster.stop()


def empty(objects: Objects) -> None:
    objects.remove_matching(".*")
    objects.close()


@pytest.fixture(params=[f"{kind}-{form}" for kind in KINDS for form in ("plain", "encrypted")])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    clock = FakeClock()
    kind, form = request.param.split("-")
    encrypted = form == "encrypted"
    open_objects: Callable[[], Objects] | None = None
    if kind == "memory":
        shelf = Shelf()
        open_objects = partial(MemoryObjects, shelf)
    elif kind == "mooncake":
        open_objects = partial(MooncakeObjects, request.getfixturevalue("cluster").address)
        empty(open_objects())

    def reopen() -> PageStore:
        if open_objects is None:
            return make_store(tmp_path, encrypted=encrypted, clock=clock)
        return make_remote(open_objects(), encrypted=encrypted, clock=clock)

    harness = Harness(kind, reopen, clock)
    yield harness
    harness.store.check_integrity()
    harness.store.close()


def test_what_was_put_comes_back(harness: Harness) -> None:
    refs = refs_of(ALICE, range(20))
    assert get(harness.store, refs) == [False] * 20
    assert put(harness.store, refs) == [True] * 20
    assert harness.store.contains_batch(refs) == [True] * 20
    assert get(harness.store, refs) == [True] * 20


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 200_000])
def test_bodies_of_any_size(harness: Harness, size: int) -> None:
    refs = refs_of(ALICE, range(3))
    assert all(put(harness.store, refs, size))
    assert all(get(harness.store, refs, size))
    assert all(get(harness.restart(), refs, size))


def test_sizes_may_differ_in_one_batch(harness: Harness) -> None:
    refs = refs_of(ALICE, range(3))
    sizes = [10, 20_000, 5000]

    def fill(index: int, body: memoryview) -> None:
        body[:] = body_of(refs[index], sizes[index])

    assert harness.store.put_batch(refs, sizes, fill) == [True] * 3
    buffers = [memoryview(bytearray(size)) for size in sizes]
    assert harness.store.get_batch(refs, copy_into(buffers)) == [True] * 3
    for ref, size, buffer in zip(refs, sizes, buffers, strict=True):
        assert bytes(buffer) == body_of(ref, size)


def test_one_batch_may_span_owners(harness: Harness) -> None:
    refs = [*refs_of(PUBLIC, [1, 2]), *refs_of(ALICE, [3, 4]), *refs_of(PUBLIC, [5])]
    assert put(harness.store, refs) == [True] * 5
    assert get(harness.store, refs) == [True] * 5
    assert set(harness.store.owners()) == {PUBLIC, ALICE}


@pytest.mark.trial(63)
def test_equal_keys_of_two_owners_are_two_pages(harness: Harness) -> None:
    alice, bob = refs_of(ALICE, range(5)), refs_of(BOB, range(5))
    assert all(put(harness.store, alice))
    assert not any(harness.store.contains_batch(bob))
    assert not any(get(harness.store, bob))
    assert all(put(harness.store, bob))
    assert all(get(harness.store, alice + bob))  # get() compares the content


def test_putting_again_keeps_one_copy(harness: Harness) -> None:
    refs = refs_of(ALICE, [1, 1, 2])
    assert put(harness.store, refs) == [True] * 3
    used = harness.store.usage(ALICE)
    assert put(harness.store, refs) == [True] * 3
    assert harness.store.usage(ALICE) == used
    assert get(harness.store, refs) == [True] * 3


def test_delete(harness: Harness) -> None:
    refs = refs_of(ALICE, range(6))
    put(harness.store, refs)
    used = harness.store.usage(ALICE)
    assert harness.store.delete(refs[:2]) == used // 3
    assert harness.store.delete(refs[:2]) == 0
    assert get(harness.store, refs) == [False] * 2 + [True] * 4
    assert get(harness.restart(), refs) == [False] * 2 + [True] * 4


def test_pages_with_gaps_between_them_in_any_order(harness: Harness) -> None:
    refs = refs_of(ALICE, range(120))
    assert all(put(harness.store, refs))
    gone = set(refs[::3])
    harness.store.delete(sorted(gone))
    random.Random(3).shuffle(refs)
    assert get(harness.store, refs) == [ref not in gone for ref in refs]
    assert all(put(harness.store, refs))
    assert all(get(harness.restart(), refs))


def test_delete_owner_touches_nobody_else(harness: Harness) -> None:
    alice, bob = refs_of(ALICE, range(300)), refs_of(BOB, range(4))
    put(harness.store, alice)
    put(harness.store, bob)
    used = harness.store.usage(ALICE)
    assert harness.store.delete_owner(ALICE) == used
    assert harness.store.usage(ALICE) == 0
    assert harness.store.owners() == [BOB]
    store = harness.restart()
    assert not any(get(store, alice))
    assert all(get(store, bob))


def test_find_owner(harness: Harness) -> None:
    put(harness.store, refs_of(BOB, [7]))
    key = refs_of(BOB, [7])[0].key
    assert harness.store.find_owner(key, [ALICE, BOB]) == BOB
    assert harness.store.find_owner(key, [ALICE]) is None


def test_expire_follows_the_last_use(harness: Harness) -> None:
    refs = refs_of(ALICE, range(3))
    for ref in refs:
        harness.clock.now += 100
        put(harness.store, [ref])
    harness.clock.now += 100
    get(harness.store, refs[:1])
    page = harness.store.usage(ALICE) // 3
    assert harness.store.expire(ALICE, before=harness.clock.now - 150) == page
    assert harness.store.contains_batch(refs) == [True, False, True]
    assert harness.store.expire(BOB, before=harness.clock.now) == 0


def test_a_restart_keeps_the_order_of_use(harness: Harness) -> None:
    if harness.kind != "disk":
        pytest.skip("only the machine that wrote a page knows when it was used, while it runs")
    refs = refs_of(ALICE, range(3))
    for ref in refs:
        harness.clock.now += 100
        put(harness.store, [ref])
    harness.clock.now += 100
    get(harness.store, refs[:1])
    store = harness.restart()
    assert all(get(store, refs[2:]))
    store.expire(ALICE, before=harness.clock.now - 50)
    assert store.contains_batch(refs) == [True, False, True]


def test_counters_tell_hits_misses_and_bytes(harness: Harness) -> None:
    refs = refs_of(ALICE, range(4))
    put(harness.store, refs[:3], 5000)
    get(harness.store, refs, 5000)
    counters = harness.store.counters
    assert (counters["stored"], counters["hit"], counters["miss"]) == (3, 3, 1)
    assert counters["stored_bytes"] == counters["hit_bytes"] == 15_000


def test_a_callback_that_raises_is_the_callers_error(harness: Harness) -> None:
    refs = refs_of(ALICE, range(4))

    def bad(index: int, body: memoryview) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        harness.store.put_batch(refs, [10] * 4, bad)
    assert not any(harness.store.contains_batch(refs))
    put(harness.store, refs)
    with pytest.raises(ZeroDivisionError):
        harness.store.get_batch(refs, bad)
    assert all(get(harness.store, refs))


def test_an_empty_batch(harness: Harness) -> None:
    assert put(harness.store, []) == get(harness.store, []) == []
    assert harness.store.contains_batch([]) == []


def test_after_close_everything_misses(harness: Harness) -> None:
    refs = refs_of(ALICE, [1])
    put(harness.store, refs)
    harness.store.close()
    harness.store.close()
    assert put(harness.store, refs_of(ALICE, [2])) == [False]
    assert get(harness.store, refs) == [False]
    assert harness.store.contains_batch(refs) == [False]
    assert harness.store.delete(refs) == 0
    harness.restart()


def test_an_owner_with_an_odd_name(harness: Harness) -> None:
    refs = [PageRef(Owner("t:größe/../\0'; DROP TABLE pages"), b"k")]
    assert put(harness.store, refs) == [True]
    assert get(harness.restart(), refs) == [True]


def test_nobody_else_may_look_into_the_folder(tmp_path: Path) -> None:
    """Also where it was there before, open to all."""
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages").chmod(0o755)
    store = make_store(tmp_path)
    try:
        assert (tmp_path / "pages").stat().st_mode & 0o777 == 0o700
    finally:
        store.close()

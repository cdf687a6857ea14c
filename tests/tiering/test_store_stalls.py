"""A disk that stalls, and calls that meet on one page: nothing hangs, nothing comes too late."""

import threading
from pathlib import Path

import pytest

from sglang_ext.tiering.transfers import copy_into
from tests.tiering.stores import (
    ALICE,
    BODY_BYTES,
    SLOT_BYTES,
    FaultyIO,
    body_of,
    disk_bytes,
    finish,
    get,
    make_store,
    put,
    refs_of,
)

REFS = refs_of(ALICE, range(8))
LONG_S = 30.0
BOTH = pytest.mark.parametrize("encrypted", [False, True])


@pytest.mark.trial(70)
@BOTH
def test_a_stalled_disk_is_a_miss_and_touches_nothing_later(
    tmp_path: Path, encrypted: bool
) -> None:
    io = FaultyIO()
    store = make_store(tmp_path, io=io, encrypted=encrypted)
    put(store, REFS)
    io.gate = threading.Event()
    buffers = [memoryview(bytearray(BODY_BYTES)) for _ in REFS]
    assert not any(store.get_batch(REFS, copy_into(buffers), timeout_s=0.05))
    assert store.counters["timeout"] == len(REFS)
    assert store.contains_batch(REFS) == [True] * len(REFS), "late is not lost"
    io.gate.set()
    assert all(get(store, REFS))
    assert not any(any(buffer) for buffer in buffers), "a late page reached the caller"
    finish(store)


def test_a_stalled_write_is_refused_and_takes_nothing_from_the_caller_later(tmp_path: Path) -> None:
    io = FaultyIO()
    store = make_store(tmp_path, io=io)
    io.write_gate = threading.Event()
    filled: list[int] = []

    def fill(index: int, body: memoryview) -> None:
        filled.append(index)
        body[:] = body_of(REFS[index])

    sizes = [BODY_BYTES] * len(REFS)
    assert not any(store.put_batch(REFS, sizes, fill, timeout_s=0.05))
    before = len(filled)
    assert io.held.is_set()
    io.write_gate.set()
    assert all(put(store, REFS))
    store.close()  # waits for the late writes
    assert len(filled) == before
    store = make_store(tmp_path, io=io)
    assert all(get(store, REFS))
    finish(store)


def test_a_page_that_is_being_written_is_not_written_twice(tmp_path: Path) -> None:
    io = FaultyIO()
    store = make_store(tmp_path, io=io)
    io.write_gate = threading.Event()
    writer = threading.Thread(target=lambda: put(store, REFS[:1]))
    writer.start()
    assert io.held.wait(LONG_S)
    assert put(store, REFS[:1]) == [True]
    io.write_gate.set()
    writer.join()
    assert store.usage(ALICE) == SLOT_BYTES
    finish(store)


def test_neighbours_are_read_in_one_call(tmp_path: Path) -> None:
    io = FaultyIO()
    store = make_store(tmp_path, io=io)
    refs = refs_of(ALICE, range(256))
    put(store, refs)
    io.reads = 0
    assert all(get(store, refs))
    assert io.reads <= 64
    finish(store)


def test_pages_deleted_while_they_are_written_do_not_appear(tmp_path: Path) -> None:
    io = FaultyIO()
    store = make_store(tmp_path, io=io)
    io.write_gate = threading.Event()
    results: list[list[bool]] = []
    writer = threading.Thread(target=lambda: results.append(put(store, REFS)))
    writer.start()
    assert io.held.wait(LONG_S)
    store.delete_owner(ALICE)
    io.write_gate.set()
    writer.join()
    assert store.contains_batch(REFS) == [False] * len(REFS)
    finish(store)


def test_a_page_deleted_while_it_is_read_frees_its_place_afterwards(tmp_path: Path) -> None:
    io = FaultyIO()
    store = make_store(tmp_path, io=io)
    put(store, REFS[:1])
    io.gate = threading.Event()
    results: list[list[bool]] = []
    reader = threading.Thread(target=lambda: results.append(get(store, REFS[:1])))
    reader.start()
    assert io.held.wait(LONG_S)
    assert store.delete_owner(ALICE) == SLOT_BYTES
    assert put(store, REFS[1:5]) == [True] * 4, "its place is not given away yet"
    io.gate.set()
    reader.join()
    assert results == [[True]], "a read that had begun may end"
    assert store.usage(ALICE) == 4 * SLOT_BYTES
    assert disk_bytes(tmp_path) == store.total_usage().total
    finish(store)
    assert disk_bytes(tmp_path) == 8 * SLOT_BYTES

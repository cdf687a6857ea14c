"""Whatever goes wrong below the store is a miss and a count: no error, no wrong bytes."""

import errno
import os
import random
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sglang_ext.tiering.nvme_store import NvmeStore
from sglang_ext.tiering.page_format import HEADER_BYTES, Reject
from sglang_ext.tiering.transfers import copy_into
from tests.tiering.stores import (
    ALICE,
    BOB,
    BODY_BYTES,
    SLOT_BYTES,
    FakeClock,
    FaultyIO,
    body_of,
    disk_bytes,
    get,
    make_store,
    put,
    refs_of,
    slab_files,
)

REFS = refs_of(ALICE, range(8))
LONG_S = 30.0
BOTH = pytest.mark.parametrize("encrypted", [False, True])


def damage(path: Path, offset: int, data: bytes) -> None:
    """Overwrite bytes behind the back of a store."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path: Path, offset: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        value = file.read(1)[0]
    damage(path, offset, bytes([value ^ (1 << bit)]))


def finish(store: NvmeStore) -> None:
    """The books are right and the store still works after the fault."""
    fresh = refs_of(BOB, range(900, 904))
    assert all(put(store, fresh))
    assert all(get(store, fresh))
    store.check_integrity()
    store.close()


@pytest.mark.trial(65)
@pytest.mark.trial(67)
@BOTH
def test_a_failing_read_is_a_miss_and_a_count(tmp_path: Path, encrypted: bool) -> None:
    io = FaultyIO()
    store = make_store(tmp_path, io=io, encrypted=encrypted)
    put(store, REFS)
    io.errors["read"] = errno.EIO
    assert not any(get(store, REFS))
    io.errors.clear()
    assert store.counters["io_error"] == len(REFS)
    assert store.usage(ALICE) == 0
    finish(store)


def test_a_short_read_is_truncated(tmp_path: Path) -> None:
    io = FaultyIO()
    store = make_store(tmp_path, io=io)
    put(store, REFS)
    io.short = 5000
    assert not any(get(store, REFS[:4]))
    io.short = 100
    assert not any(get(store, REFS[4:]))
    io.short = None
    assert store.counters[Reject.TRUNCATED] == len(REFS)
    finish(store)


@pytest.mark.trial(60)
@pytest.mark.parametrize("call", ["write", "reserve"])
def test_a_full_disk_refuses_pages_and_goes_on(tmp_path: Path, call: str) -> None:
    io = FaultyIO()
    store = make_store(tmp_path, io=io)
    io.errors[call] = errno.ENOSPC
    assert not any(put(store, REFS))
    assert store.counters["no_space"] > 0
    assert disk_bytes(tmp_path) == store.total_usage().total
    io.errors.clear()
    assert all(put(store, REFS))
    finish(store)


@pytest.mark.trial(60)
def test_a_disk_that_is_full_below_the_cap_keeps_taking_new_pages(tmp_path: Path) -> None:
    io = FaultyIO()
    store = make_store(tmp_path, io=io)
    put(store, refs_of(ALICE, range(2000)))  # more than one reservation
    store.close()
    store = make_store(tmp_path, io=io)
    io.errors["reserve"] = errno.ENOSPC
    new = refs_of(BOB, range(8))
    assert all(put(store, new))
    assert all(get(store, new))
    assert store.counters["evicted"] == 8
    io.errors.clear()
    finish(store)


@pytest.mark.trial(59)
@pytest.mark.parametrize("code", [errno.EPERM, errno.EROFS])
def test_a_file_that_refuses_writes_does_not_stop_new_pages(tmp_path: Path, code: int) -> None:
    io = FaultyIO()
    store = make_store(tmp_path, io=io, total=64 * SLOT_BYTES)
    old = refs_of(ALICE, range(4))  # half of the first file
    put(store, old)
    io.errors.update(write=code, punch=code)
    assert not any(put(store, refs_of(ALICE, range(100, 104))))
    assert store.counters["refused_by_disk"] > 0
    io.errors.clear()
    for number in range(200, 300):
        assert put(store, refs_of(ALICE, [number])) == [True], number
        assert store.total_usage().total <= 64 * SLOT_BYTES
    assert all(get(store, old)), "the pages of the frozen file stay readable"
    finish(store)


@pytest.mark.trial(59)
@pytest.mark.skipif(shutil.which("chattr") is None, reason="needs chattr")
def test_a_really_immutable_file(tmp_path: Path) -> None:
    store = make_store(tmp_path, total=64 * SLOT_BYTES)
    put(store, refs_of(ALICE, range(64)))
    oldest = slab_files(tmp_path)[0]
    with immutable(oldest):
        results = [put(store, refs_of(ALICE, [number]))[0] for number in range(100, 300)]
        assert all(results[-100:])
        assert all(get(store, refs_of(ALICE, range(290, 300))))
        assert store.total_usage().total <= 64 * SLOT_BYTES
        store.close()
        # SQLite and the lock lie beside it, so that even a restart works.
        again = make_store(tmp_path, total=64 * SLOT_BYTES) if writable(oldest) else None
        assert again is None
    finish(make_store(tmp_path, total=64 * SLOT_BYTES))


@contextmanager
def immutable(path: Path) -> Iterator[None]:
    if subprocess.run(["chattr", "+i", path], capture_output=True, check=False).returncode:
        pytest.skip("this file system has no immutable files")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", path], check=True)


def writable(path: Path) -> bool:
    try:
        with path.open("r+b"):
            return True
    except OSError:
        return False


@pytest.mark.parametrize("clean", [False, True])
def test_a_page_that_cannot_be_deleted_stays_deleted(tmp_path: Path, clean: bool) -> None:
    io = FaultyIO()
    store = make_store(tmp_path, io=io)
    put(store, REFS)
    io.errors["punch"] = errno.EPERM
    assert store.delete(REFS[:3]) > 0
    assert store.counters["stuck"] == 3
    assert get(store, REFS) == [False] * 3 + [True] * 5
    assert store.total_usage().idle >= 3 * SLOT_BYTES, "it still takes its place"
    store.close()
    if not clean:
        (tmp_path / "pages" / "clean").unlink()
    store = make_store(tmp_path, io=io)
    assert get(store, REFS) == [False] * 3 + [True] * 5
    store.close()
    io.errors.clear()
    store = make_store(tmp_path, io=io)
    assert get(store, REFS) == [False] * 3 + [True] * 5
    assert store.total_usage().idle == 0
    finish(store)


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


@pytest.mark.trial(70)
@BOTH
def test_one_flipped_bit_on_disk_is_a_miss(tmp_path: Path, encrypted: bool) -> None:
    store = make_store(tmp_path, encrypted=encrypted)
    refs = refs_of(ALICE, range(40))
    put(store, refs)
    (path,) = slab_files(tmp_path)
    dice = random.Random(1)
    spots = [*range(0, 102, 5), *dice.sample(range(102, HEADER_BYTES + BODY_BYTES), 19)]
    for slot, spot in zip(range(40), spots, strict=True):
        flip(path, slot * SLOT_BYTES + spot, dice.randrange(8))
    assert not any(get(store, refs))
    assert sum(store.counters.get(reason, 0) for reason in Reject) == 40
    assert store.usage(ALICE) == 0
    finish(store)


@BOTH
def test_zero_filled_truncated_and_swapped_files(tmp_path: Path, encrypted: bool) -> None:
    store = make_store(tmp_path, encrypted=encrypted)
    put(store, REFS)
    (path,) = slab_files(tmp_path)
    damage(path, 0, bytes(2 * SLOT_BYTES))
    content = path.read_bytes()
    third, fourth = (content[n * SLOT_BYTES : (n + 1) * SLOT_BYTES] for n in (2, 3))
    damage(path, 2 * SLOT_BYTES, fourth + third)
    os.truncate(path, 7 * SLOT_BYTES + 5000)
    assert sum(get(store, REFS)) == 3
    counters = store.counters
    assert counters[Reject.EMPTY] == 2
    assert counters[Reject.OTHER_KEY] == 2
    assert counters[Reject.TRUNCATED] == 1
    finish(store)


@pytest.mark.trial(63)
def test_files_of_two_stores_swapped_never_serve_the_other(tmp_path: Path) -> None:
    for name, owner in (("one", ALICE), ("two", BOB)):
        store = make_store(tmp_path / name)
        put(store, refs_of(owner, range(8)))
        store.close()
    (one,), (two,) = slab_files(tmp_path / "one"), slab_files(tmp_path / "two")
    swap = tmp_path / "swap"
    one.rename(swap)
    two.rename(one)
    swap.rename(two)
    store = make_store(tmp_path / "one")
    assert not any(get(store, refs_of(ALICE, range(8))))
    assert store.counters[Reject.OTHER_OWNER] == 8
    finish(store)


def test_a_clock_that_jumps_loses_nothing(tmp_path: Path) -> None:
    clock = FakeClock()
    store = make_store(tmp_path, clock=clock, total=10 * SLOT_BYTES)
    for jump in (1e9, -5e8, 0.0, -1e9, 3e6):
        clock.now += jump
        assert all(put(store, REFS))
        assert all(get(store, REFS))
    # A use while the clock was wrong must not make pages look older than they are.
    clock.now -= 1e6
    assert all(get(store, REFS))
    clock.now += 1e6
    assert store.expire(ALICE, before=clock.now - 10) == 0
    store.close()
    store = make_store(tmp_path, clock=clock, total=10 * SLOT_BYTES)
    assert all(get(store, REFS))
    put(store, refs_of(ALICE, range(100, 110)))
    assert store.total_usage().total <= 10 * SLOT_BYTES
    finish(store)


@pytest.mark.trial(72)
def test_nothing_readable_and_no_prompt_hash_on_disk(tmp_path: Path) -> None:
    store = make_store(tmp_path, encrypted=True)
    put(store, REFS)
    store.flush()
    store.close()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 4
    for path in files:
        content = path.read_bytes()
        for ref in REFS:
            assert body_of(ref)[:32] not in content, path
            assert ref.key not in content, path


def test_padding_of_a_page_holds_no_bytes_of_another(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    for size in (BODY_BYTES, 100, 5000):
        put(store, refs_of(ALICE, range(size, size + 8)), size)
    for path in slab_files(tmp_path):
        slot_bytes = int(path.stem.partition("-")[2])
        content = path.read_bytes()
        for start in range(0, len(content), slot_bytes):
            slot = content[start : start + slot_bytes]
            sizes = [size for size in (100, 5000, BODY_BYTES) if HEADER_BYTES + size <= slot_bytes]
            assert not slot.strip(b"\0") or any(
                not any(slot[HEADER_BYTES + size :]) for size in sizes[-1:]
            )
    store.close()


def test_the_index_failing_is_counted_and_costs_a_scan_only(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    put(store, REFS)
    for path in (tmp_path / "pages").glob("index.sqlite*"):
        damage(path, 0, b"garbage" * 2000)
    put(store, refs_of(ALICE, range(50, 60)))
    store.flush()
    assert all(get(store, REFS))
    store.close()
    store = make_store(tmp_path)
    assert all(get(store, REFS + refs_of(ALICE, range(50, 60))))
    finish(store)

"""A disk that refuses, fails or is full is a miss and a count: no error, no wrong bytes."""

import errno
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sglang_ext.tiering.page_format import Reject
from tests.tiering.stores import (
    ALICE,
    BOB,
    SLOT_BYTES,
    FakeClock,
    FaultyIO,
    disk_bytes,
    finish,
    get,
    make_store,
    put,
    refs_of,
    slab_files,
)

REFS = refs_of(ALICE, range(8))
BOTH = pytest.mark.parametrize("encrypted", [False, True])


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

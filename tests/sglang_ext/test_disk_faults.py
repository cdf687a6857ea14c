"""A bad disk below SGLang's own cache: what it withholds is computed again, and nothing hangs."""

import errno
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_ext.radix.integrity import check_integrity
from sglang_ext.types import Owner
from tests.sglang_ext.test_tiers import fetch, fill, leave_memory, load, page_bytes
from tests.sglang_ext.tiered import PAGE, TieredRig, tiered
from tests.tiering.stores import FaultyIO, disk_bytes_in

TEXT = list(range(16))
FORK = [*TEXT[:8], *range(100, 108)]
"""Shares the first half of TEXT."""
SHORT_S = 0.1


class FaultyRig:
    """A rig with the NVMe tier, over an I/O object that fails on demand."""

    def __init__(self, rig: TieredRig, io: FaultyIO, folder: Path) -> None:
        self.rig = rig
        self.io = io
        self.folder = folder
        self.store: Any = rig.cache.store.backend.store

    def counted(self, name: str) -> int:
        return self.rig.cache.store.counters().get(name, 0)

    def compute_again(self) -> None:
        """Compute TEXT anew, as a request does whose pages did not come; the disk has it then."""
        self.rig.write(TEXT)
        before = page_bytes(self.rig, TEXT, "t:a").clone()
        leave_memory(self.rig)
        assert fetch(self.rig, TEXT, "t:a") == len(TEXT)
        load(self.rig, TEXT, "t:a")
        assert torch.equal(page_bytes(self.rig, TEXT, "t:a"), before)
        self.store.check_integrity()


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyRig]:
    io = FaultyIO()
    monkeypatch.setattr("sglang_ext.tiering.nvme_store.FileIO", lambda: io)
    with ExitStack() as stack:
        rig = stack.enter_context(tiered(tmp_path))
        stack.callback(io.heal)
        yield FaultyRig(rig, io, tmp_path)


@pytest.mark.trial(65)
@pytest.mark.trial(67)
def test_a_read_that_fails_is_computed_again(faulty: FaultyRig) -> None:
    faulty.rig.write(TEXT)
    leave_memory(faulty.rig)
    faulty.io.errors["read"] = errno.EIO
    assert fetch(faulty.rig, TEXT, "t:a") == 0
    assert faulty.counted("io_error") == len(TEXT) // PAGE
    faulty.io.heal()
    faulty.compute_again()


@pytest.mark.trial(69)
@pytest.mark.trial(70)
def test_a_read_that_stalls_ends_at_its_deadline_and_touches_nothing_later(
    faulty: FaultyRig,
) -> None:
    rig, pool = faulty.rig, faulty.rig.cache.cache_controller.mem_pool_host
    rig.write(TEXT)
    leave_memory(rig)
    faulty.store._timeout_s = SHORT_S
    faulty.io.gate = threading.Event()
    assert fetch(rig, TEXT, "t:a") == 0
    assert faulty.counted("timeout") == len(TEXT) // PAGE
    pool.kv_buffer.view(torch.uint8).fill_(0xAB)
    faulty.io.heal()
    faulty.store.close()  # waits for the late reads
    assert (pool.kv_buffer.view(torch.uint8) == 0xAB).all()


@pytest.mark.trial(60)
def test_a_full_disk_keeps_the_pages_in_memory(faulty: FaultyRig) -> None:
    faulty.io.errors.update(reserve=errno.ENOSPC, write=errno.ENOSPC)
    faulty.rig.write(TEXT)
    assert faulty.rig.where(TEXT) == (len(TEXT), 0)
    assert faulty.counted("no_space") > 0
    assert not faulty.store.owners()
    leave_memory(faulty.rig)
    assert fetch(faulty.rig, TEXT, "t:a") == 0
    faulty.io.heal()
    faulty.compute_again()


@pytest.mark.trial(47)
def test_a_node_that_splits_while_it_is_stored_loses_nothing(faulty: FaultyRig) -> None:
    rig = faulty.rig
    fill(rig)
    faulty.io.write_gate = threading.Event()
    rig.insert(TEXT)
    while not faulty.io.held.is_set():
        rig.cache.check_hicache_events()
    rig.insert(FORK)
    check_integrity(rig.cache)
    before = {tuple(text): page_bytes(rig, text, "t:a").clone() for text in (TEXT, FORK)}
    faulty.io.heal()
    rig.settle()
    for text, expected in before.items():
        leave_memory(rig)
        assert fetch(rig, list(text), "t:a") == len(text)
        load(rig, list(text), "t:a")
        assert torch.equal(page_bytes(rig, list(text), "t:a"), expected)


@pytest.mark.trial(76)
def test_an_eviction_during_a_slow_store_neither_hangs_nor_stores_other_bytes(
    faulty: FaultyRig,
) -> None:
    rig = faulty.rig
    fill(rig)
    faulty.io.write_gate = threading.Event()
    rig.insert(TEXT)
    before = page_bytes(rig, TEXT, "t:a").clone()
    while not faulty.io.held.is_set():
        rig.cache.check_hicache_events()
    rig.evict(10**6)
    rig.cache.evict_host(10**6)
    check_integrity(rig.cache)
    fill(rig)
    faulty.io.heal()
    rig.settle()
    leave_memory(rig)
    assert fetch(rig, TEXT, "t:a") == len(TEXT)
    load(rig, TEXT, "t:a")
    assert torch.equal(page_bytes(rig, TEXT, "t:a"), before)


@pytest.mark.trial(54)
def test_a_host_pool_that_gives_nothing_up_is_a_miss(faulty: FaultyRig) -> None:
    rig, pool = faulty.rig, faulty.rig.cache.cache_controller.mem_pool_host
    rig.write(TEXT)
    leave_memory(rig)
    taken = pool.alloc(pool.available_size())
    assert fetch(rig, TEXT, "t:a") == 0
    pool.free(taken)
    assert fetch(rig, TEXT, "t:a") == len(TEXT)


@pytest.mark.trial(73)
def test_what_is_dropped_leaves_the_disk(faulty: FaultyRig) -> None:
    faulty.rig.write(TEXT)
    held = disk_bytes_in(faulty.folder)
    assert faulty.store.delete_owner(Owner("t:a")) > 0
    assert disk_bytes_in(faulty.folder) < held

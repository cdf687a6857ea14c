"""The way back up, when it is not worth it, comes late, fails, or is in the way of an eviction."""

import threading
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, InitLoadBackParams

from sglang_ext.fetching import Outcome
from sglang_ext.namespace import frame
from sglang_ext.radix.integrity import check_integrity
from sglang_ext.tiering.worth import NEVER, Choice
from sglang_ext.types import Owner, Tier
from tests.sglang_ext.test_tiers import fetch, leave_memory, load
from tests.sglang_ext.tiered import TieredRig, tiered

TEXT = list(range(16))
HANDLE = CacheRequestHandle("r", 0)


def begin(rig: TieredRig, tokens: list[int]) -> None:
    """Ask the disk for a text of which nothing is in memory."""
    cache, found = rig.cache, rig.match(tokens)
    owner = frame(Owner("t:a"))
    cache.prefetch_from_storage(
        HANDLE, found.last_host_node, array("q", tokens), None, None, array("q"), owner
    )


def outcomes(rig: TieredRig) -> dict[str, int]:
    return {outcome.value: tokens for outcome, tokens in rig.cache.fetched.items() if tokens}


def host_free(rig: TieredRig) -> int:
    return int(rig.cache.cache_controller.mem_pool_host.available_size())


class Gate:
    """Holds calls up until it is opened."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        self._call = call

    def __call__(self, *args: Any) -> Any:
        self.entered.set()
        assert self.open.wait(60)
        return self._call(*args)


def test_a_fetch_that_takes_longer_than_computing_is_not_made(tmp_path: Path) -> None:
    with tiered(tmp_path) as rig:
        rig.write(TEXT)
        leave_memory(rig)
        rig.cache.worth.agree([1, NEVER, 0])
        assert fetch(rig, TEXT, "t:a") == 0
        assert rig.cache.choices == {(Tier.NVME, Choice.RECOMPUTE): 1}
        rig.cache.worth.agree([1, 1, 0])
        assert fetch(rig, TEXT, "t:a") == len(TEXT)
        assert rig.cache.choices[Tier.NVME, Choice.LOAD] == 1


@pytest.mark.parametrize("worth", [True, False])
def test_host_memory_is_left_alone_where_computing_is_quicker(worth: bool) -> None:
    with tiered() as rig:
        rig.write(TEXT)
        rig.evict(10**6)
        rig.cache.worth.agree([1 if worth else NEVER, NEVER, 0])
        found = rig.match(TEXT)
        req = SimpleNamespace(
            rid="r", last_node=found.last_device_node, swa_host_hit_length=0,
            mamba_host_hit_length=0, kv=SimpleNamespace(mamba_pool_idx=None),
        )  # fmt: skip
        tokens, _ = rig.cache.init_load_back(
            InitLoadBackParams(found.best_match_node, found.host_hit_length, req=req)
        )
        assert tokens == (len(TEXT) if worth else 0)
        rig.cache.ready_to_load_host_cache()
        rig.settle()
        assert set(rig.cache.choices) == {(Tier.CPU, Choice.LOAD if worth else Choice.RECOMPUTE)}


@pytest.mark.trial(69)
def test_what_has_not_come_in_the_time_of_computing_it_is_computed(tmp_path: Path) -> None:
    """And nothing is lost when it comes after all."""
    with tiered(tmp_path) as rig:
        rig.write(TEXT)
        leave_memory(rig)
        backend, free = rig.cache.cache_controller.storage_backend, host_free(rig)
        gate = Gate(backend.batch_get_v1)
        backend.batch_get_v1 = gate
        rig.cache.prefetch_timeout_base = 10**6
        rig.cache.worth.agree([1, 1, 1000])
        begin(rig, TEXT)
        while not gate.entered.is_set():
            rig.cache.check_hicache_events()
        while not rig.cache.check_prefetch_progress(HANDLE):
            rig.cache.check_hicache_events()
        assert rig.cache.pop_prefetch_loaded_span(HANDLE) == (0, None)
        rig.cache.finish_storage_prefetch_admission(HANDLE, 0, None)
        assert outcomes(rig) == {"issued": len(TEXT), "late": len(TEXT)}
        check_integrity(rig.cache)
        gate.open.set()
        while host_free(rig) < free:
            rig.cache.check_hicache_events()
        assert rig.where(TEXT) == (0, 0)
        assert fetch(rig, TEXT, "t:a") == len(TEXT)


def test_a_slow_disk_stops_being_asked(tmp_path: Path) -> None:
    with tiered(tmp_path) as rig:
        worth = rig.cache.worth
        for tokens in (100, 2000):
            worth.computed(tokens, 1e-4 * tokens)
        rig.cache.tick()
        operation = SimpleNamespace(handle=HANDLE, stats_requested_tokens=1000)
        rig.cache._start_storage_prefetch_wait(operation)
        rig.cache._mark_prefetch_deadline_expired(operation)
        rig.cache.tick()
        assert worth.choose(Tier.NVME, 4000) is Choice.RECOMPUTE


@pytest.mark.trial(65)
@pytest.mark.trial(67)
@pytest.mark.parametrize("failure", [OSError("EIO"), [False] * 4, [True, False, True, True]])
def test_a_read_that_fails_is_computed_and_counted(tmp_path: Path, failure: Any) -> None:
    with tiered(tmp_path) as rig:
        rig.write(TEXT)
        leave_memory(rig)
        free = host_free(rig)
        backend = rig.cache.cache_controller.storage_backend
        read = backend.batch_get_v1

        def fails(*args: Any) -> Any:
            if isinstance(failure, Exception):
                raise failure
            read(*args)
            return failure

        backend.batch_get_v1 = fails
        came = fetch(rig, TEXT, "t:a")
        assert came == (4 if failure == [True, False, True, True] else 0)
        assert rig.cache.fetched[Outcome.FAILED] == len(TEXT) - came
        rig.cache.evict_host(10**6)
        rig.cache.check_hicache_events()
        assert host_free(rig) == free


@pytest.mark.trial(76)
def test_evictions_go_on_while_the_disk_is_slow(tmp_path: Path) -> None:
    with tiered(tmp_path) as rig:
        free = host_free(rig)
        backend = rig.cache.cache_controller.storage_backend
        gate = Gate(backend.batch_set_v1)
        backend.batch_set_v1 = gate
        rig.insert(TEXT)
        while not gate.entered.is_set():
            rig.cache.check_hicache_events()
        assert rig.evict(10**6) == len(TEXT)
        assert rig.cache.evict_host(10**6) == 0
        rig.insert([100, 101, 102, 103], "t:b")
        rig.cache.check_hicache_events()
        check_integrity(rig.cache)
        gate.open.set()
        rig.settle()
        leave_memory(rig)
        assert host_free(rig) == free
        assert fetch(rig, TEXT, "t:a") == len(TEXT)


@pytest.mark.trial(54)
def test_without_any_room_the_disk_is_left_alone(tmp_path: Path) -> None:
    with tiered(tmp_path) as rig:
        rig.write(TEXT)
        leave_memory(rig)
        pool = rig.cache.cache_controller.mem_pool_host
        taken = pool.alloc(host_free(rig))
        assert fetch(rig, TEXT, "t:a") == 0
        assert outcomes(rig) == {"issued": len(TEXT), "no_room": len(TEXT)}
        pool.free(taken)
        assert fetch(rig, TEXT, "t:a") == len(TEXT)


def test_an_aborted_request_wastes_what_it_fetched(tmp_path: Path) -> None:
    with tiered(tmp_path) as rig:
        rig.write(TEXT)
        leave_memory(rig)
        rig.cache.prefetch_stop_policy = "wait_complete"
        begin(rig, TEXT)
        while not rig.cache.check_prefetch_progress(HANDLE):
            rig.cache.check_hicache_events()
        rig.cache.release_aborted_request(HANDLE)
        assert outcomes(rig) == {"issued": len(TEXT), "wasted": len(TEXT)}
        assert rig.where(TEXT) == (0, len(TEXT))


def test_every_way_between_two_tiers_is_metered(tmp_path: Path) -> None:
    with tiered(tmp_path) as rig:
        cache = rig.cache
        rig.write(TEXT)
        leave_memory(rig)
        fetch(rig, TEXT, "t:a")
        load(rig, TEXT, "t:a")
        size = len(TEXT) * cache.ledger.bytes_per_token
        ways = [
            *((Tier.HBM, Tier.CPU), (Tier.CPU, Tier.NVME)),
            *((Tier.NVME, Tier.CPU), (Tier.CPU, Tier.HBM)),
        ]
        assert cache.moved_bytes == dict.fromkeys(ways, size)
        assert set(cache.moved_seconds) == set(ways)
        assert min(cache.moved_seconds.values()) > 0
        assert len(cache.ready_seconds) == 1

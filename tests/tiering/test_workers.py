"""Batches end at their deadline and leave the caller's memory alone afterwards."""

import os
import threading
from pathlib import Path

import pytest

from sglang_ext.tiering.file_io import FileIO
from sglang_ext.tiering.workers import Batch, Workers, measure_depth, scratch
from tests.tiering.stores import FaultyIO

LONG_S = 30.0


@pytest.mark.parametrize("together", [1, 3, 100, 1000])
def test_every_page_is_worked_on_once(together: int) -> None:
    seen: list[int] = []
    workers = Workers(4)

    def work(batch: Batch, places: range) -> None:
        for place in places:
            seen.append(place)
            batch.results[place] = place != 7

    batch = Batch(100, work, together)
    workers.start(batch)
    outcome = batch.wait(LONG_S)
    assert sorted(seen) == list(range(100))
    assert outcome.results == [place != 7 for place in range(100)]
    assert (outcome.late, outcome.error) == (0, None)
    assert workers.stop(LONG_S)


def test_threads_may_give_way_to_others() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    found: list[int] = []
    workers = Workers(1, niceness=3)
    batch = Batch(1, lambda batch, places: found.append(niceness()))
    workers.start(batch)
    batch.wait(LONG_S)
    assert found == [min(19, niceness() + 3)]
    assert workers.stop(LONG_S)


def test_what_is_late_may_not_touch_the_callers_memory() -> None:
    gate, ended = threading.Event(), threading.Event()
    touched: list[int] = []
    allowed: list[bool] = []

    def work(batch: Batch, places: range) -> None:
        gate.wait()
        allowed.append(batch.guarded(lambda: touched.extend(places)))
        ended.set()

    workers = Workers(1)
    batch = Batch(3, work)
    workers.start(batch)
    outcome = batch.wait(0.01)
    assert outcome.results == [False] * 3
    assert outcome.late == 3
    gate.set()
    assert ended.wait(LONG_S)
    assert workers.stop(LONG_S)
    assert touched == []
    assert not any(allowed)


def test_the_deadline_waits_for_a_copy_that_has_begun() -> None:
    begun, go_on, returned = threading.Event(), threading.Event(), threading.Event()

    def touch() -> None:
        begun.set()
        go_on.wait()

    workers = Workers(1)
    batch = Batch(2, lambda batch, _: batch.guarded(touch) and None)
    workers.start(batch)
    assert begun.wait(LONG_S)

    def wait() -> None:
        batch.wait(0.0)
        returned.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert not returned.is_set()
    go_on.set()
    assert returned.wait(LONG_S)
    waiter.join()
    workers.stop(LONG_S)


def test_an_error_of_the_caller_reaches_the_caller_and_no_worker_dies() -> None:
    def work(batch: Batch, places: range) -> None:
        batch.results[places[0]] = bool(1 // places[0])

    workers = Workers(1)
    batch = Batch(2, work)
    workers.start(batch)
    outcome = batch.wait(LONG_S)
    assert isinstance(outcome.error, ZeroDivisionError)
    assert outcome.results == [False, True]
    again = Batch(1, lambda *_: None)
    workers.start(again)
    assert again.wait(LONG_S).late == 0
    workers.stop(LONG_S)


def test_a_stuck_worker_keeps_nobody() -> None:
    gate, begun = threading.Event(), threading.Event()

    def hang(batch: Batch, places: range) -> None:
        begun.set()
        gate.wait()

    workers = Workers(1)
    batch = Batch(1, hang)
    workers.start(batch)
    assert begun.wait(LONG_S)
    assert batch.wait(0.0).late == 1
    assert not workers.stop(0.01)
    gate.set()


def test_scratch_is_aligned_and_reused() -> None:
    first = scratch(8192)
    assert len(first) == 8192
    assert scratch(4096).obj is first.obj
    assert len(scratch(1 << 20)) == 1 << 20


def test_depth_is_measured_and_leaves_nothing_behind(tmp_path: Path) -> None:
    assert measure_depth(tmp_path, FileIO()) in (1, 2, 4, 8)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_measured_gets_a_default(tmp_path: Path) -> None:
    io = FaultyIO()
    io.errors["write"] = 28
    assert measure_depth(tmp_path, io) == 8
    assert list(tmp_path.iterdir()) == []

"""Threads that read and write pages, and batches that end at their deadline.

A page that a stalled disk delivers after the deadline must not touch the caller's memory, which by
then may belong to somebody else. So a thread works in a buffer of its own and touches the caller's
memory only inside ``Batch.guarded``, which refuses once the batch is closed.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from xxhash import xxh3_128

from sglang_ext.tiering.file_io import FileIO, aligned_buffer

__all__ = ["Batch", "Outcome", "Workers", "measure_depth", "scratch"]

logger = logging.getLogger(__name__)

_CANDIDATES = (1, 2, 4, 8)  # more threads would only wait for the interpreter's lock
_THREADS_A_CORE = 2  # one computes while the other waits for the disk
_PROBE_BYTES = 16 * 2**20
_PROBE_BLOCK_BYTES = 256 * 2**10
_GOOD_ENOUGH = 0.95
_NICEST = 19
_local = threading.local()


def scratch(size: int) -> memoryview:
    """Return this thread's own aligned buffer, at least ``size`` bytes, with whatever it held."""
    buffer: memoryview | None = getattr(_local, "buffer", None)
    if buffer is None or len(buffer) < size:
        buffer = _local.buffer = aligned_buffer(size)
    return buffer[:size]


class Outcome(NamedTuple):
    """What became of a batch."""

    results: list[bool]
    late: int
    """Pages that were not done at the deadline."""
    error: Exception | None
    """What a callback of the caller raised."""


class Batch:
    """``count`` pages that several threads work on, until all are done or the deadline is there.

    ``work`` is given the batch and the positions of ``together`` pages at a time, and sets
    ``results`` of those that succeed.
    """

    def __init__(
        self, count: int, work: Callable[["Batch", range], None], together: int = 1
    ) -> None:
        self.results = [False] * count
        self._work = work
        self._together = together
        self._next = 0
        self._left = count
        self._in_caller_memory = 0
        self._closed = False
        self._error: Exception | None = None
        self._changed = threading.Condition()

    def run(self) -> None:
        """Work on pages until none is left or the batch is closed; called by each worker."""
        while places := self._take():
            try:
                self._work(self, places)
            # Whatever the caller's own callback raises belongs to the caller of wait().
            except Exception as error:
                self._error = error
            with self._changed:
                self._left -= len(places)
                if self._left == 0:
                    self._changed.notify_all()

    def guarded(self, touch: Callable[[], None]) -> bool:
        """Run ``touch``, which uses the caller's memory, unless the batch is closed (False)."""
        with self._changed:
            if self._closed:
                return False
            self._in_caller_memory += 1
        try:
            touch()
        finally:
            with self._changed:
                self._in_caller_memory -= 1
                if self._closed:
                    self._changed.notify_all()
        return True

    def wait(self, timeout_s: float) -> Outcome:
        """Close the batch when all is done or ``timeout_s`` is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._left == 0, timeout_s)
            self._closed = True
            self._changed.wait_for(lambda: self._in_caller_memory == 0)
            return Outcome(list(self.results), self._left, self._error)

    @property
    def shares(self) -> int:
        """How many threads can work on it at the same time."""
        return -(-len(self.results) // self._together)

    def _take(self) -> range:
        with self._changed:
            if self._closed:
                return range(0)
            begin = self._next
            self._next = min(begin + self._together, len(self.results))
            return range(begin, self._next)


class Workers:
    """``depth`` daemon threads: one that hangs in the kernel keeps neither us nor Python's exit.

    ``niceness``: by how much they give way to all other threads.
    """

    def __init__(self, depth: int, niceness: int = 0) -> None:
        self._niceness = niceness
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._loop, name=f"sglang-ext-store-{number}", daemon=True)
            for number in range(depth)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def depth(self) -> int:
        """How many pages are read or written at the same time."""
        return len(self._threads)

    def start(self, batch: Batch, most: int | None = None) -> None:
        """Let as many threads work on ``batch`` as it can use, but not more than ``most``."""
        for _ in range(min(batch.shares, self.depth if most is None else most)):
            self._queue.put(batch.run)

    def stop(self, timeout_s: float) -> bool:
        """Let the threads finish what they do; False when one is still stuck after the timeout."""
        for _ in self._threads:
            self._queue.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _loop(self) -> None:
        # A sandbox may forbid it.
        with suppress(OSError):
            _give_way(self._niceness)
        while (task := self._queue.get()) is not None:
            task()


def _give_way(niceness: int) -> None:
    """Raise the niceness of this thread; that of the process is the one of its main thread."""
    thread = threading.get_native_id()
    wanted = os.getpriority(os.PRIO_PROCESS, thread) + niceness
    os.setpriority(os.PRIO_PROCESS, thread, min(wanted, _NICEST))


def measure_depth(folder: Path, io: FileIO) -> int:
    """Return the smallest depth that reaches 95% of the best rate; takes some 200 ms.

    Both ways count, and a thread hashes what it moves, as it will for every page. A folder that
    cannot be measured gets a middle value: the store will count its errors.
    """
    path = folder / "probe"
    try:
        return _measure(path, io)
    except OSError as error:
        logger.warning("cannot measure %s (%s): moving 8 pages at a time", folder, error)
        return 8
    finally:
        with suppress(OSError):
            io.unlink(path)


def _measure(path: Path, io: FileIO) -> int:
    fd = io.open(path, _PROBE_BYTES)
    try:
        io.write(fd, aligned_buffer(_PROBE_BYTES), 0)
        return max(_smallest(partial(move, io, fd)) for move in (_write, _read))
    finally:
        io.close(fd)


def _write(io: FileIO, fd: int, offset: int) -> None:
    block = scratch(_PROBE_BLOCK_BYTES)
    xxh3_128(block).digest()
    io.write(fd, block, offset)


def _read(io: FileIO, fd: int, offset: int) -> None:
    block = scratch(_PROBE_BLOCK_BYTES)
    io.read(fd, block, offset)
    xxh3_128(block).digest()


def _smallest(move: Callable[[int], None]) -> int:
    """Return the smallest depth at which blocks move almost as fast as at the best one."""
    most = _THREADS_A_CORE * len(os.sched_getaffinity(0))
    rates = {depth: _rate(move, depth) for depth in _CANDIDATES if depth <= most}
    best = max(rates.values())
    return next(depth for depth, rate in rates.items() if rate >= _GOOD_ENOUGH * best)


def _rate(move: Callable[[int], None], depth: int) -> float:
    """Blocks per second, the best of three passes over the probe."""
    workers = Workers(depth)
    try:
        return max(_pass_rate(workers, move) for _ in range(3))
    finally:
        workers.stop(1.0)


def _pass_rate(workers: Workers, move: Callable[[int], None]) -> float:
    count = _PROBE_BYTES // _PROBE_BLOCK_BYTES
    batch = Batch(count, lambda _, places: move(places[0] * _PROBE_BLOCK_BYTES))
    begin = time.perf_counter()
    workers.start(batch)
    outcome = batch.wait(1.0)
    if outcome.error is not None:
        raise outcome.error
    return count / (time.perf_counter() - begin)

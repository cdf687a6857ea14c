"""Threads that read and write pages, and batches that end at their deadline.

A page that a stalled disk delivers after the deadline must not touch the caller's memory, which by
then may belong to somebody else. So a thread works in a buffer of its own and touches the caller's
memory only inside ``Batch.guarded``, which refuses once the batch is closed.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from sglang_ext.tiering.file_io import FileIO, aligned_buffer

__all__ = ["Batch", "Outcome", "Workers", "measure_depth", "scratch"]

logger = logging.getLogger(__name__)

_CANDIDATES = (1, 2, 4, 8, 16, 32)
_PROBE_BYTES = 8 * 2**20
_PROBE_READ_BYTES = 64 * 2**10
_GOOD_ENOUGH = 0.9
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
    unbegun: range
    """Pages that nobody began to work on; nobody ever will."""
    late: int
    """Pages that were not done at the deadline."""
    error: Exception | None
    """What a callback of the caller raised."""


class Batch:
    """``count`` pages that several threads work on, until all are done or the deadline is there."""

    def __init__(self, count: int, work: Callable[["Batch", int], bool]) -> None:
        self._work = work
        self._results = [False] * count
        self._next = 0
        self._left = count
        self._in_caller_memory = 0
        self._closed = False
        self._error: Exception | None = None
        self._changed = threading.Condition()

    def run(self) -> None:
        """Work on pages until none is left or the batch is closed; called by each worker."""
        while (index := self._take()) is not None:
            try:
                self._finish(index, self._work(self, index))
            # Whatever the caller's own callback raises belongs to the caller of wait().
            except Exception as error:
                self._error = error
                self._finish(index, False)

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
                self._changed.notify_all()
        return True

    def wait(self, timeout_s: float) -> Outcome:
        """Close the batch when all is done or ``timeout_s`` is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._left == 0, timeout_s)
            self._closed = True
            self._changed.wait_for(lambda: self._in_caller_memory == 0)
            unbegun = range(self._next, len(self._results))
            return Outcome(list(self._results), unbegun, self._left, self._error)

    def _take(self) -> int | None:
        with self._changed:
            if self._closed or self._next == len(self._results):
                return None
            self._next += 1
            return self._next - 1

    def _finish(self, index: int, result: bool) -> None:
        with self._changed:
            self._results[index] = result and not self._closed
            self._left -= 1
            if self._left == 0:
                self._changed.notify_all()


class Workers:
    """``depth`` daemon threads: one that hangs in the kernel keeps neither us nor Python's exit."""

    def __init__(self, depth: int) -> None:
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

    def start(self, batch: Batch, count: int) -> None:
        """Let as many threads as ``count`` pages can use work on ``batch``."""
        for _ in range(min(count, self.depth)):
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
        while (task := self._queue.get()) is not None:
            task()


def measure_depth(folder: Path, io: FileIO) -> int:
    """Return the smallest depth whose reads reach 90% of the best rate; takes some 100 ms.

    A folder that cannot be measured gets a middle value: the store will count its errors.
    """
    path = folder / "probe"
    try:
        return _measure(path, io)
    except OSError as error:
        logger.warning("cannot measure %s (%s): reading 8 pages at a time", folder, error)
        return 8
    finally:
        with suppress(OSError):
            io.unlink(path)


def _measure(path: Path, io: FileIO) -> int:
    fd = io.open(path, _PROBE_BYTES)
    try:
        io.write(fd, aligned_buffer(_PROBE_BYTES), 0)
        rates = {depth: _read_rate(fd, depth, io) for depth in _CANDIDATES}
    finally:
        io.close(fd)
    best = max(rates.values())
    return next(depth for depth, rate in rates.items() if rate >= _GOOD_ENOUGH * best)


def _read_rate(fd: int, depth: int, io: FileIO) -> float:
    """Reads per second, the better of two passes over the probe."""
    count = _PROBE_BYTES // _PROBE_READ_BYTES

    def read(_: Batch, index: int) -> bool:
        io.read(fd, scratch(_PROBE_READ_BYTES), index * _PROBE_READ_BYTES)
        return True

    workers = Workers(depth)
    try:
        return max(_pass_rate(workers, count, read) for _ in range(2))
    finally:
        workers.stop(1.0)


def _pass_rate(workers: Workers, count: int, read: Callable[[Batch, int], bool]) -> float:
    batch = Batch(count, read)
    begin = time.perf_counter()
    workers.start(batch, count)
    batch.wait(1.0)
    return count / (time.perf_counter() - begin)

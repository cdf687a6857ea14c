"""Batches of pages between the caller's memory and slots on disk."""

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from sglang_ext.tiering.codec import PageCodec
from sglang_ext.tiering.counters import Counters, reason_of
from sglang_ext.tiering.file_io import FileIO, round_up
from sglang_ext.tiering.page_format import HEADER_BYTES, Reject
from sglang_ext.tiering.page_index import Entry
from sglang_ext.tiering.slabs import Slot
from sglang_ext.tiering.space import Space
from sglang_ext.tiering.workers import Batch, Outcome, Workers, scratch
from sglang_ext.types import Owner

__all__ = ["Deliver", "Fill", "PageRef", "Transfers", "copy_from", "copy_into"]

_STEP_S = 1e-6

Fill = Callable[[int, memoryview], None]
"""(position in the batch, where the body goes): write all of it. Called from several threads."""

Deliver = Callable[[int, memoryview], None]
"""(position in the batch, the body): copy it away; it is gone after the call. Several threads."""


class PageRef(NamedTuple):
    """Which page: its owner, and its key (1 to 128 bytes, for example a hash)."""

    owner: Owner
    key: bytes


def copy_from(buffers: Sequence[memoryview]) -> Fill:
    """Return a ``Fill`` that takes the bodies from ``buffers``, of the sizes told to the store."""

    def fill(index: int, body: memoryview) -> None:
        np.copyto(_bytes(body), _bytes(buffers[index]))

    return fill


def copy_into(buffers: Sequence[memoryview]) -> Deliver:
    """Return a ``Deliver`` that copies the bodies into ``buffers``, each of exactly its size."""

    def deliver(index: int, body: memoryview) -> None:
        np.copyto(_bytes(buffers[index]), _bytes(body))

    return deliver


class _Read(NamedTuple):
    position: int
    owner: Owner
    name: bytes
    entry: Entry


class _Write:
    __slots__ = ("cancelled", "name", "owner", "position", "size", "slot")

    def __init__(self, position: int, owner: Owner, name: bytes, size: int, slot: Slot) -> None:
        self.position = position
        self.owner = owner
        self.name = name
        self.size = size
        self.slot = slot
        self.cancelled = False
        """The page was deleted meanwhile; it must not appear."""


class Transfers:
    """Reads and writes pages on the workers; ``lock`` guards ``space``, and is free during I/O."""

    def __init__(
        self,
        space: Space,
        lock: threading.Lock,
        codec: PageCodec,
        workers: Workers,
        io: FileIO,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._space = space
        self._lock = lock
        self._codec = codec
        self._workers = workers
        self._io = io
        self._counters = counters
        self._clock = clock
        self._writing: dict[tuple[Owner, bytes], _Write] = {}

    def names(self, refs: Sequence[PageRef], writing: bool) -> list[bytes | None]:
        """Return the names under which pages are filed; None where an owner has no usable key."""
        names: list[bytes | None] = [None] * len(refs)
        for owner in dict.fromkeys(ref.owner for ref in refs):
            places = [place for place, ref in enumerate(refs) if ref.owner == owner]
            keys = [refs[place].key for place in places]
            filed = self._codec.file_names(owner, keys, writing)
            if filed is None:
                self._counters.add(Reject.NO_KEY, len(keys))
                continue
            for place, name in zip(places, filed, strict=True):
                names[place] = name
        return names

    def put(
        self, refs: Sequence[PageRef], sizes: Sequence[int], fill: Fill, timeout_s: float
    ) -> list[bool]:
        """Write pages; True for each that is stored now, or was already (or is being written)."""
        results = [False] * len(refs)
        jobs: list[_Write] = []
        names = self.names(refs, writing=True)
        with self._lock:
            for place, (ref, name) in enumerate(zip(refs, names, strict=True)):
                if name is None:
                    continue
                job = self._admit(place, ref.owner, name, sizes[place])
                results[place] = job is True
                if isinstance(job, _Write):
                    jobs.append(job)
        batch = Batch(len(jobs), lambda batch, number: self._write(batch, jobs[number], fill))
        outcome = self._run(batch, jobs, timeout_s)
        for number in outcome.unbegun:
            self._end_write(jobs[number], written=False)
        with self._lock:
            self._use(refs, names)
        if outcome.error is not None:
            raise outcome.error
        return _scatter(results, jobs, outcome.results)

    def get(self, refs: Sequence[PageRef], deliver: Deliver, timeout_s: float) -> list[bool]:
        """Read pages; True for each that was delivered before the deadline."""
        results = [False] * len(refs)
        jobs: list[_Read] = []
        names = self.names(refs, writing=False)
        with self._lock:
            found = self._use(refs, names)
            for place, (ref, name) in enumerate(zip(refs, names, strict=True)):
                entry = found.get(place)
                if name is not None and entry is not None:
                    entry.readers += 1
                    jobs.append(_Read(place, ref.owner, name, entry))
        self._counters.add("miss", len(refs) - len(jobs))
        batch = Batch(len(jobs), lambda batch, number: self._read(batch, jobs[number], deliver))
        outcome = self._run(batch, jobs, timeout_s)
        with self._lock:
            for number in outcome.unbegun:
                self._space.unpin(jobs[number].entry)
        if outcome.error is not None:
            raise outcome.error
        return _scatter(results, jobs, outcome.results)

    def cancel_writes(self, owner: Owner, names: set[bytes] | None = None) -> None:
        """Keep pages that are being written (None: all of the owner) from appearing.

        The caller holds the lock.
        """
        for job in self._writing.values():
            if job.owner == owner and (names is None or job.name in names):
                job.cancelled = True

    def _run(self, batch: Batch, jobs: Sequence[_Read | _Write], timeout_s: float) -> Outcome:
        self._workers.start(batch, len(jobs))
        outcome = batch.wait(timeout_s)
        if outcome.late:
            self._counters.add("timeout", outcome.late)
        return outcome

    def _admit(self, place: int, owner: Owner, name: bytes, size: int) -> _Write | bool:
        if self._space.index.find(owner, name) is not None or (owner, name) in self._writing:
            return True
        slot = self._space.take(owner, round_up(HEADER_BYTES + size))
        if slot is None:
            return False
        job = self._writing[owner, name] = _Write(place, owner, name, size, slot)
        return job

    def _use(self, refs: Sequence[PageRef], names: Sequence[bytes | None]) -> dict[int, Entry]:
        """Mark pages as used, the last of the batch as the least recently used one.

        A batch is a path of the tree: a page is worth nothing without those before it, so the far
        end must leave first. The times differ too, so that a restart keeps the order.
        """
        now = self._clock()
        found = {}
        for place in reversed(range(len(refs))):
            name = names[place]
            if name is None:
                continue
            entry = self._space.touch(refs[place].owner, name, now - place * _STEP_S)
            if entry is not None:
                found[place] = entry
        return found

    def _write(self, batch: Batch, job: _Write, fill: Fill) -> bool:
        slab, slot = job.slot
        page = scratch(slab.slot_bytes)
        body = page[HEADER_BYTES : HEADER_BYTES + job.size]
        written = False
        try:
            # The rest of the last block would otherwise carry bytes of another page to disk.
            page[HEADER_BYTES + job.size :] = bytes(len(page) - HEADER_BYTES - job.size)
            filled = batch.guarded(lambda: fill(job.position, body))
            now_ms = max(0, int(self._clock() * 1000))
            if filled and self._codec.seal(page, job.owner, job.name, job.size, now_ms):
                self._io.write(slab.fd, page, slab.offset(slot))
                written = True
        except OSError as error:
            self._refused(job, error)
        finally:
            self._end_write(job, written)
        return written

    def _refused(self, job: _Write, error: OSError) -> None:
        reason = reason_of(error)
        self._counters.add(reason)
        if reason == "refused_by_disk":
            with self._lock:
                self._space.slabs.freeze(job.slot[0])

    def _end_write(self, job: _Write, written: bool) -> None:
        with self._lock:
            del self._writing[job.owner, job.name]
            if written and not job.cancelled:
                now = self._clock() - job.position * _STEP_S
                self._space.publish(job.owner, job.name, job.slot, now)
                self._counters.add("stored")
                self._counters.add("stored_bytes", job.size)
            else:
                self._space.cancel(job.owner, job.slot)

    def _read(self, batch: Batch, job: _Read, deliver: Deliver) -> bool:
        lost = True
        try:
            body = self._load(job)
            lost = body is None
            if body is None or not batch.guarded(lambda: deliver(job.position, body)):
                return False
            self._counters.add("hit")
            self._counters.add("hit_bytes", len(body))
            return True
        finally:
            with self._lock:
                if lost and not job.entry.removed:
                    self._space.drop(job.owner, job.name)
                self._space.unpin(job.entry)

    def _load(self, job: _Read) -> memoryview | None:
        slab, slot = job.entry.slot
        page = scratch(slab.slot_bytes)
        try:
            count = self._io.read(slab.fd, page, slab.offset(slot))
        except OSError as error:
            self._counters.add(reason_of(error))
            return None
        body = self._codec.open(page[:count], job.owner, job.name)
        if isinstance(body, Reject):
            self._counters.add(body)
            return None
        return body


def _scatter(
    results: list[bool], jobs: Sequence[_Read | _Write], done: Sequence[bool]
) -> list[bool]:
    for job, result in zip(jobs, done, strict=True):
        results[job.position] = result
    return results


def _bytes(view: memoryview) -> np.ndarray:
    return np.frombuffer(view, dtype=np.uint8)

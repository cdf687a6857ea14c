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
from sglang_ext.tiering.runs import Job, Load
from sglang_ext.tiering.slabs import Slab
from sglang_ext.tiering.space import Space
from sglang_ext.tiering.workers import Batch, Workers
from sglang_ext.types import Owner

__all__ = [
    "Deliver",
    "Fill",
    "PageRef",
    "Transfers",
    "bytes_on_disk",
    "copy_from",
    "copy_into",
]

_STEP_S = 1e-6
_TOGETHER_BYTES = 2**20
"""Small pages are moved several at a time, up to this size."""
_TURNS = 2
"""Each thread gets so many shares of a full batch, so that some copy while others wait."""

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
    bodies = [_bytes(buffer) for buffer in buffers]

    def fill(index: int, body: memoryview) -> None:
        np.copyto(_bytes(body), bodies[index])

    return fill


def copy_into(buffers: Sequence[memoryview]) -> Deliver:
    """Return a ``Deliver`` that copies the bodies into ``buffers``, each of exactly its size."""
    targets = [_bytes(buffer) for buffer in buffers]

    def deliver(index: int, body: memoryview) -> None:
        np.copyto(targets[index], _bytes(body))

    return deliver


class _Put:
    """One call of ``put``. ``cancelled`` holds owners and pages deleted since it began."""

    def __init__(
        self,
        refs: Sequence[PageRef],
        names: Sequence[bytes | None],
        sizes: Sequence[int],
        fill: Fill,
    ) -> None:
        self.refs = refs
        self.names = names
        self.sizes = sizes
        self.fill = fill
        self.cancelled: set[Owner | PageRef] = set()

    def is_cancelled(self, page: PageRef) -> bool:
        return page.owner in self.cancelled or page in self.cancelled


class Transfers:
    """Reads and writes pages on the workers; ``lock`` guards ``space``, and is free during I/O.

    A worker takes a slot, or holds on to a page, only when it begins with it. So pages that the
    deadline cut off hold nothing, and no time is lost before the first byte moves.
    """

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
        self._puts: set[_Put] = set()
        self._writing: set[PageRef] = set()

    def names(self, refs: Sequence[PageRef], writing: bool) -> list[bytes | None]:
        """Return the names under which pages are filed; None where an owner has no usable key."""
        names = self._codec.names(refs, writing)
        if None in names:
            self._counters.add(Reject.NO_KEY, names.count(None))
        return names

    def put(
        self, refs: Sequence[PageRef], sizes: Sequence[int], fill: Fill, timeout_s: float
    ) -> list[bool]:
        """Write pages; True for each that is stored now, or was already (or is being written)."""
        call = _Put(refs, self.names(refs, writing=True), sizes, fill)
        with self._lock:
            self._puts.add(call)
        try:
            return self._run(
                lambda batch, places: self._put_some(batch, call, places),
                len(refs),
                bytes_on_disk(max(sizes, default=0)),
                timeout_s,
            )
        finally:
            with self._lock:
                self._puts.remove(call)
                self._use(refs, call.names)

    def get(self, refs: Sequence[PageRef], deliver: Deliver, timeout_s: float) -> list[bool]:
        """Read pages; True for each that was delivered before the deadline."""
        names = self.names(refs, writing=False)
        with self._lock:
            largest = self._use(refs, names)
        return self._run(
            lambda batch, places: self._get_some(batch, refs, names, places, deliver),
            len(refs),
            largest,
            timeout_s,
        )

    def cancel_writes(self, deleted: Owner | PageRef) -> None:
        """Keep pages of calls that have begun from appearing: all of an owner, or one (its name).

        The caller holds the lock.
        """
        for call in self._puts:
            call.cancelled.add(deleted)

    def _run(
        self,
        work: Callable[[Batch, range], None],
        count: int,
        slot_bytes: int,
        timeout_s: float,
    ) -> list[bool]:
        """Let the workers share ``count`` pages, small ones several at a time."""
        share = -(-count // (self._workers.depth * _TURNS))
        together = min(_TOGETHER_BYTES // slot_bytes, share)
        batch = Batch(count, work, max(1, together))
        self._workers.start(batch)
        outcome = batch.wait(timeout_s)
        if outcome.late:
            self._counters.add("timeout", outcome.late)
        if outcome.error is not None:
            raise outcome.error
        return outcome.results

    def _use(self, refs: Sequence[PageRef], names: Sequence[bytes | None]) -> int:
        """Mark pages as used, the last of the batch as the least recently used one.

        A batch is a path of the tree: a page is worth nothing without those before it, so the far
        end must leave first. The times differ too, so that a restart keeps the order. Returns the
        bytes of the largest slot.
        """
        now = self._clock()
        largest = HEADER_BYTES
        for place in reversed(range(len(refs))):
            name = names[place]
            if name is None:
                continue
            entry = self._space.touch(refs[place].owner, name, now - place * _STEP_S)
            if entry is not None:
                largest = max(largest, entry.bytes)
        return largest

    def _put_some(self, batch: Batch, call: _Put, places: range) -> None:
        with self._lock:
            jobs = [job for place in places if (job := self._admit(batch, call, place))]
        written: set[int] = set()
        try:
            if jobs and self._write(batch, call, jobs):
                written = {job.place for job in jobs if job.error is None}
        finally:
            with self._lock:
                for job in jobs:
                    self._settle(batch, call, job, job.place in written)

    def _admit(self, batch: Batch, call: _Put, place: int) -> Job | None:
        """Return what is to be done for one page; None when it is there, or refused."""
        name = call.names[place]
        if name is None:
            return None
        page = PageRef(call.refs[place].owner, name)
        if page in self._writing or self._space.index.find(*page) is not None:
            batch.results[place] = True
            return None
        slot = self._space.take(page.owner, bytes_on_disk(call.sizes[place]))
        if slot is None:
            return None
        self._writing.add(page)
        return Job(place, page.owner, name, slot, call.sizes[place])

    def _write(self, batch: Batch, call: _Put, jobs: list[Job]) -> bool:
        load = Load(jobs)

        def fill() -> None:
            for job in jobs:
                call.fill(job.place, job.block[HEADER_BYTES : HEADER_BYTES + job.size])

        if not batch.guarded(fill):
            return False
        now_ms = max(0, int(self._clock() * 1000))
        for job in jobs:
            # The rest of the last block would otherwise carry bytes of another page to disk.
            used = HEADER_BYTES + job.size
            job.block[used:] = bytes(len(job.block) - used)
            seal = self._codec.sealer(job.owner)
            if seal is None:
                self._wipe(jobs)
                return False
            seal(job.block, job.name, job.size, now_ms)
        load.write(self._io)
        return True

    def _settle(self, batch: Batch, call: _Put, job: Job, written: bool) -> None:
        """End a write, good or bad; the caller holds the lock."""
        page = PageRef(job.owner, job.name)
        self._writing.remove(page)
        if job.error is not None:
            self._refused(job.slot[0], job.error)
        if not written or call.is_cancelled(page):
            self._space.cancel(job.owner, job.slot)
            return
        self._space.publish(job.owner, job.name, job.slot, self._clock() - job.place * _STEP_S)
        self._counters.add("stored")
        self._counters.add("stored_bytes", job.size)
        batch.results[job.place] = True

    def _refused(self, slab: Slab, error: OSError) -> None:
        reason = reason_of(error)
        self._counters.add(reason)
        if reason == "refused_by_disk":
            self._space.slabs.freeze(slab)

    def _get_some(
        self,
        batch: Batch,
        refs: Sequence[PageRef],
        names: Sequence[bytes | None],
        places: range,
        deliver: Deliver,
    ) -> None:
        held: list[tuple[Job, Entry]] = []
        with self._lock:
            for place in places:
                owner, name = refs[place].owner, names[place]
                entry = None if name is None else self._space.index.find(owner, name)
                if name is not None and entry is not None:
                    entry.readers += 1
                    held.append((Job(place, owner, name, entry.slot), entry))
        self._counters.add("miss", len(places) - len(held))
        whole = {job.place for job, _ in held}
        try:
            bodies = self._load([job for job, _ in held])
            whole = {job.place for job, _ in bodies}
            self._deliver(batch, bodies, deliver)
        finally:
            self._wipe([job for job, _ in held])
            with self._lock:
                for job, entry in held:
                    self._let_go(job, entry, whole=job.place in whole)

    def _let_go(self, job: Job, entry: Entry, whole: bool) -> None:
        """End a read; a page that is not whole is deleted. The caller holds the lock."""
        if not whole and not entry.removed:
            self._space.drop(job.owner, job.name)
        self._space.unpin(entry)

    def _load(self, jobs: list[Job]) -> list[tuple[Job, memoryview]]:
        """Read pages; returns the bodies of those that are whole and the ones asked for."""
        if not jobs:
            return []
        Load(jobs).read(self._io)
        bodies = []
        for job in jobs:
            if job.error is not None:
                self._counters.add(reason_of(job.error))
                continue
            body = self._codec.opener(job.owner)(job.block, job.name)
            if isinstance(body, Reject):
                self._counters.add(body)
                continue
            bodies.append((job, body))
        return bodies

    def _wipe(self, jobs: Sequence[Job]) -> None:
        """Leave nothing in this thread's buffer that lies encrypted on the disk."""
        for job in jobs:
            if job.block and self._codec.encrypts(job.owner):
                job.block[:] = bytes(len(job.block))

    def _deliver(
        self, batch: Batch, bodies: list[tuple[Job, memoryview]], deliver: Deliver
    ) -> None:
        def hand_over() -> None:
            for job, body in bodies:
                deliver(job.place, body)
                batch.results[job.place] = True

        if batch.guarded(hand_over):
            self._counters.add("hit", len(bodies))
            self._counters.add("hit_bytes", sum(len(body) for _, body in bodies))


def bytes_on_disk(size: int) -> int:
    """Return the bytes on disk of a page with a body of ``size`` bytes."""
    return round_up(HEADER_BYTES + size)


def _bytes(view: memoryview) -> np.ndarray:
    return np.frombuffer(view, dtype=np.uint8)

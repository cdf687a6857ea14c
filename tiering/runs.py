"""Pages that lie side by side on disk move in one system call.

A batch is mostly a path of the tree that was written in one go, so its small pages are neighbours.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sglang_ext.tiering.file_io import FileIO
from sglang_ext.tiering.slabs import Slab, Slot
from sglang_ext.tiering.workers import scratch
from sglang_ext.types import Owner

__all__ = ["Job", "Load"]

_NOTHING = memoryview(b"")


@dataclass(slots=True)
class Job:
    """One page on its way between a slot and this thread's buffer."""

    place: int
    """Position in the batch."""
    owner: Owner
    name: bytes
    slot: Slot
    size: int = 0
    """Bytes of the body; 0 before a page was read."""
    start: int = 0
    block: memoryview = _NOTHING
    """The slot's bytes in the buffer, from ``start`` on; shorter when the file ends early."""
    error: OSError | None = None


_Move = Callable[[Slab, memoryview, int], int]


class Load:
    """The pages of one thread at one time, laid out in its buffer in the order of the disk."""

    def __init__(self, jobs: list[Job]) -> None:
        jobs.sort(key=lambda job: (job.slot[0].number, job.slot[1]))
        self._buffer = scratch(sum(job.slot[0].slot_bytes for job in jobs))
        self._jobs = jobs
        start = 0
        for job in jobs:
            job.start = start
            start += job.slot[0].slot_bytes
            job.block = self._buffer[job.start : start]

    def read(self, io: FileIO) -> None:
        """Fill the blocks from disk; a page that fails has its own ``error``."""
        self._move(lambda slab, view, offset: io.read(slab.fd, view, offset))

    def write(self, io: FileIO) -> None:
        """Write the blocks to disk; a page that fails has its own ``error``."""

        def write(slab: Slab, view: memoryview, offset: int) -> int:
            io.write(slab.fd, view, offset)
            return len(view)

        self._move(write)

    def _move(self, move: _Move) -> None:
        for run in _neighbours(self._jobs):
            if self._try(run, move) is None:
                continue
            # One bad block must not cost its neighbours.
            for job in run:
                job.error = self._try([job], move)

    def _try(self, run: Sequence[Job], move: _Move) -> OSError | None:
        slab, first = run[0].slot
        start = run[0].start
        view = self._buffer[start : start + len(run) * slab.slot_bytes]
        try:
            count = move(slab, view, slab.offset(first))
        except OSError as error:
            return error
        if count < len(view):
            for job in run:
                job.block = job.block[: max(0, start + count - job.start)]
        return None


def _neighbours(jobs: Sequence[Job]) -> Iterator[Sequence[Job]]:
    """Cut jobs, in the order of the disk, where the next one does not follow at once."""
    begin = 0
    for end in range(1, len(jobs) + 1):
        if end == len(jobs) or not _follows(jobs[end - 1].slot, jobs[end].slot):
            yield jobs[begin:end]
            begin = end


def _follows(left: Slot, right: Slot) -> bool:
    return left[0] is right[0] and left[1] + 1 == right[1]

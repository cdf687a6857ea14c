"""Slab files: large files cut into slots of equal size, one page a slot.

One file a page was measured beside this and is slower: creating and renaming a small file costs
more than writing it. A slot is one of

    hole    no disk blocks: never used, or punched when its page was deleted
    ready   disk blocks but no page: reserved ahead, or just freed by an eviction
    taken   holds a page, or is being written
    stuck   cannot be given back (immutable or failing file); counts against the cap, is not used

so the blocks of all slots that are not holes are what ``du`` shows. Not thread-safe.
"""

import errno
import heapq
import logging
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from sglang_ext.tiering.file_io import BLOCK_BYTES, FileIO, aligned_buffer

__all__ = ["Slab", "Slabs", "Slot"]

logger = logging.getLogger(__name__)

_FILES_PER_FOLDER = 1024
_MAX_SLABS_PER_SIZE = 256
_MIN_SLAB_BYTES = 16 * 2**20
_LARGEST_SHARE = 8
"""A file that turns bad takes at most one part in so many of the cap with it."""
_RESERVE_BYTES = 16 * 2**20
_NAME = re.compile(r"(\d{6})-(\d+)\.slab")

Slot = tuple["Slab", int]
"""A slab and the number of a slot in it."""


class Slab:
    """One open file and which of its slots are free."""

    __slots__ = ("fd", "frozen", "holes", "number", "path", "ready", "slot_bytes", "slots")

    def __init__(self, number: int, path: Path, fd: int, slot_bytes: int, slots: int) -> None:
        self.number = number
        self.path = path
        self.fd = fd
        self.slot_bytes = slot_bytes
        self.slots = slots
        self.holes: list[int] = list(range(slots))  # a heap, so that files fill from the front
        self.ready: list[int] = []
        self.frozen = False
        """A write was refused: nothing new goes here until the next start."""

    def offset(self, slot: int) -> int:
        """Return where ``slot`` begins, in bytes."""
        return slot * self.slot_bytes


class Slabs:
    """All slab files of a folder."""

    def __init__(self, folder: Path, io: FileIO, total_bytes: int) -> None:
        self._folder = folder
        self._io = io
        wanted = max(_MIN_SLAB_BYTES, total_bytes // _MAX_SLABS_PER_SIZE)
        self._slab_bytes = min(wanted, total_bytes // _LARGEST_SHARE)
        self._by_number: dict[int, Slab] = {}
        self._by_size: dict[int, list[Slab]] = defaultdict(list)
        self._latest: dict[int, Slab] = {}
        """By size, the slab whose slots were taken or freed last."""
        self.ready_bytes = 0
        self.stuck: set[tuple[int, int]] = set()
        self.stuck_bytes = 0

    def __iter__(self) -> Iterator[Slab]:
        return iter(self._by_number.values())

    def get(self, number: int) -> Slab | None:
        """Return the slab of that number, if its file is there."""
        return self._by_number.get(number)

    def load(self) -> None:
        """Open the slab files that a former run left, all slots free. Raises OSError."""
        for path in sorted(self._folder.glob("*/*.slab")):
            if found := _NAME.fullmatch(path.name):
                number, slot_bytes = map(int, found.groups())
                if number not in self._by_number and _is_slot_size(slot_bytes):
                    self._add(number, slot_bytes, path)

    def occupy(self, slab: Slab, slots: set[int]) -> None:
        """Mark slots of a loaded slab as taken; used once, at start."""
        slab.holes = [slot for slot in slab.holes if slot not in slots]

    def take(self, slot_bytes: int, room: int) -> Slot | None:
        """Take a free slot of that size; None when blocks for it would exceed ``room`` bytes.

        Raises OSError when the disk refuses; no slot is taken then.
        """
        slab = self._with_ready(slot_bytes)
        if slab is None:
            if room < slot_bytes:
                return None
            slab = self._with_holes(slot_bytes)
            self._reserve(slab, room)
        self._latest[slot_bytes] = slab
        self.ready_bytes -= slot_bytes
        return slab, slab.ready.pop()

    def recycle(self, slot: Slot) -> None:
        """Free a slot and keep its blocks for the next page, which overwrites what is there."""
        slab, number = slot
        slab.ready.append(number)
        self._latest[slab.slot_bytes] = slab
        self.ready_bytes += slab.slot_bytes

    def give_back(self, slot: Slot) -> bool:
        """Free a slot and its blocks: its page can never be read again.

        False when the file refuses; the slot is stuck then.
        """
        slab, number = slot
        try:
            self._erase(slab, number)
        except OSError as error:
            logger.warning("cannot delete a page in %s: %s", slab.path, error)
            self._add_stuck(slab, number)
            return False
        heapq.heappush(slab.holes, number)
        return True

    def trim(self, keep_slot_bytes: int | None = None) -> bool:
        """Give back the blocks of ready slots, but not of slots of size ``keep_slot_bytes``.

        False when there was nothing to give back.
        """
        before = self.ready_bytes
        for slab in self:
            if slab.slot_bytes != keep_slot_bytes:
                self._trim(slab)
        return self.ready_bytes < before

    def freeze(self, slab: Slab) -> None:
        """Write nothing more into a slab whose file refused a write; its pages stay readable."""
        slab.frozen = True
        self._trim(slab)

    def restore_stuck(self, stuck: set[tuple[int, int]]) -> None:
        """Try again, at start, to free slots that were stuck; what still fails stays stuck."""
        for number, slot in stuck:
            slab = self.get(number)
            if slab is None or slot >= slab.slots or slot not in slab.holes:
                continue
            slab.holes.remove(slot)
            heapq.heapify(slab.holes)
            self.give_back((slab, slot))

    def sweep(self) -> None:
        """Punch everything that is not taken, at start: leftovers of a killed run.

        A file that refuses keeps its leftovers and gets no new pages.
        """
        for slab in self:
            try:
                for first, count in _runs(sorted(slab.holes)):
                    self._io.punch(slab.fd, slab.offset(first), count * slab.slot_bytes)
            except OSError as error:
                logger.warning("cannot sweep %s: %s", slab.path, error)
                self.freeze(slab)

    def drop_empty(self) -> None:
        """Remove files without a page, at start: of another page size, or no longer needed."""
        for slab in [slab for slab in self if len(slab.holes) == slab.slots]:
            try:
                self._io.unlink(slab.path)
            except OSError as error:
                logger.warning("cannot remove %s: %s", slab.path, error)
                continue
            self._io.close(slab.fd)
            del self._by_number[slab.number]
            self._by_size[slab.slot_bytes].remove(slab)

    def close(self) -> None:
        """Close all files."""
        for slab in self:
            fd, slab.fd = slab.fd, -1  # a late user gets an error, not somebody else's file
            self._io.close(fd)
        self._by_number.clear()
        self._by_size.clear()

    def _usable(self, slot_bytes: int) -> Iterator[Slab]:
        return (slab for slab in self._by_size[slot_bytes] if not slab.frozen)

    def _with_ready(self, slot_bytes: int) -> Slab | None:
        """Return a slab with a ready slot, mostly the one that was used last: O(1) then."""
        latest = self._latest.get(slot_bytes)
        if latest is not None and latest.ready and not latest.frozen:
            return latest
        return next((slab for slab in self._usable(slot_bytes) if slab.ready), None)

    def _with_holes(self, slot_bytes: int) -> Slab:
        slab = next((slab for slab in self._usable(slot_bytes) if slab.holes), None)
        if slab is not None:
            return slab
        number = max(self._by_number, default=-1) + 1
        parent = self._folder / f"{number // _FILES_PER_FOLDER:03d}"
        return self._add(number, slot_bytes, parent / f"{number:06d}-{slot_bytes}.slab")

    def _add(self, number: int, slot_bytes: int, path: Path) -> Slab:
        slots = max(1, self._slab_bytes // slot_bytes)
        size = path.stat().st_size if path.exists() else 0
        slots = max(slots, size // slot_bytes)
        fd = self._io.open(path, slots * slot_bytes)
        slab = self._by_number[number] = Slab(number, path, fd, slot_bytes, slots)
        self._by_size[slot_bytes].append(slab)
        return slab

    def _trim(self, slab: Slab) -> None:
        ready, slab.ready = slab.ready, []
        self.ready_bytes -= len(ready) * slab.slot_bytes
        for slot in ready:
            self.give_back((slab, slot))

    def _reserve(self, slab: Slab, room: int) -> None:
        """Turn neighbouring holes into ready slots with one call, fewer on a disk almost full."""
        slots = _pop_neighbours(slab.holes, max(1, min(_RESERVE_BYTES, room) // slab.slot_bytes))
        while (error := self._try_reserve(slab, slots)) is not None:
            keep = len(slots) // 2 if error.errno == errno.ENOSPC else 0
            for slot in slots[keep:]:
                heapq.heappush(slab.holes, slot)
            slots = slots[:keep]
            if not slots:
                raise error
        slab.ready.extend(reversed(slots))
        self.ready_bytes += len(slots) * slab.slot_bytes

    def _try_reserve(self, slab: Slab, slots: list[int]) -> OSError | None:
        try:
            self._io.reserve(slab.fd, slab.offset(slots[0]), len(slots) * slab.slot_bytes)
        except OSError as error:
            return error
        return None

    def _erase(self, slab: Slab, slot: int) -> None:
        offset = slab.offset(slot)
        if not self._io.punch(slab.fd, offset, slab.slot_bytes):
            self._io.write(slab.fd, aligned_buffer(BLOCK_BYTES), offset)

    def _add_stuck(self, slab: Slab, slot: int) -> None:
        self.stuck.add((slab.number, slot))
        self.stuck_bytes += slab.slot_bytes


def _pop_neighbours(heap: list[int], most: int) -> list[int]:
    """Take the smallest number of a heap, and those that follow it without a gap."""
    taken = [heapq.heappop(heap)]
    while len(taken) < most and heap and heap[0] == taken[-1] + 1:
        taken.append(heapq.heappop(heap))
    return taken


def _is_slot_size(size: int) -> bool:
    return size > 0 and size % BLOCK_BYTES == 0


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of neighbouring numbers in an ordered list."""
    begin = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            yield numbers[begin], end - begin
            begin = end

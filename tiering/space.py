"""The room of a store: which pages are in, which slots they hold, and who leaves when it is full.

Every byte is one of four: pages of the index, slots being written, ready slots, stuck slots. Their
sum never exceeds the cap, and is what ``du`` shows. Not thread-safe: the store holds its lock.
"""

import errno
import logging
from collections import Counter
from collections.abc import Collection

from sglang_ext.tiering.caps import Caps, VictimOrder
from sglang_ext.tiering.counters import Counters, reason_of
from sglang_ext.tiering.index_db import IndexWriter, Row
from sglang_ext.tiering.page_index import Entry, PageIndex
from sglang_ext.tiering.slabs import Slabs, Slot
from sglang_ext.types import PUBLIC, Owner

__all__ = ["Space"]

logger = logging.getLogger(__name__)

_TOUCH_GRANULARITY_S = 30.0
"""A read is written to the index on disk at most this often for one page."""


class Space:
    """Gives slots to writers and takes them back, within the caps."""

    def __init__(
        self,
        slabs: Slabs,
        index: PageIndex,
        writer: IndexWriter,
        counters: Counters,
        caps: Caps,
        order: VictimOrder,
    ) -> None:
        self.slabs = slabs
        self.index = index
        self.caps = caps
        self.fixed: Collection[Owner] = frozenset()
        self._writer = writer
        self._counters = counters
        self._order = order
        self._writing: Counter[Owner] = Counter()
        self._unreleased = 0
        """Bytes of removed pages that somebody still reads."""

    @property
    def used_bytes(self) -> int:
        """Bytes on disk, all owners and all kinds together."""
        slabs = self.slabs
        taken = self.index.total_bytes + self._writing.total() + self._unreleased
        return taken + slabs.ready_bytes + slabs.stuck_bytes

    def take(self, owner: Owner, slot_bytes: int) -> Slot | None:
        """Take a slot for a page of ``owner``, evicting as needed; None (and a count) if refused.

        O(owners) for each eviction. The caller ends with ``publish`` or ``cancel``.
        """
        ceiling = min(self.caps.ceiling(owner), self.caps.total_bytes)
        if slot_bytes > ceiling:
            self._counters.add("over_cap")
            return None
        while self.index.usage.get(owner, 0) + self._writing[owner] + slot_bytes > ceiling:
            if not self._evict_from(owner, slot_bytes):
                self._counters.add("no_room")
                return None
        slot = self._take_or_evict(owner, slot_bytes)
        if slot is not None:
            self._writing[owner] += slot_bytes
        return slot

    def publish(self, owner: Owner, key: bytes, slot: Slot, now: float) -> None:
        """Make a written page visible."""
        self._end_writing(owner, slot)
        entry = Entry(slot, now)
        self.index.add(owner, key, entry)
        self._save(owner, key, entry)

    def cancel(self, owner: Owner, slot: Slot) -> None:
        """Give back a slot whose page was not written, or must not be seen."""
        self._end_writing(owner, slot)
        self._give_back(slot)

    def touch(self, owner: Owner, key: bytes, now: float) -> Entry | None:
        """Find a page and mark it as used now, unless its owner's pages age from the first day."""
        if owner in self.fixed:
            return self.index.find(owner, key)
        entry = self.index.touch(owner, key, now)
        if entry is not None and entry.last_access - entry.saved_access >= _TOUCH_GRANULARITY_S:
            self._save(owner, key, entry)
        return entry

    def drop(self, owner: Owner, key: bytes) -> int:
        """Delete a page, its bytes on disk included; returns the bytes that became free.

        While somebody reads it, it is only forgotten: ``unpin`` frees it.
        """
        entry = self._forget(owner, key)
        if entry.readers:
            self._unreleased += entry.bytes
        else:
            self._give_back(entry.slot)
        return entry.bytes

    def unpin(self, entry: Entry) -> None:
        """End a read that began with ``entry.readers += 1``."""
        entry.readers -= 1
        if entry.removed and not entry.readers:
            self._unreleased -= entry.bytes
            self._give_back(entry.slot)

    def shrink(self) -> None:
        """Evict until everything is below caps that were just lowered."""
        for owner in self.index.owners():
            while self.index.usage.get(owner, 0) > self.caps.ceiling(owner):
                if not self._evict_from(owner, 0):
                    break
        if self.used_bytes > self.caps.total_bytes:
            self.slabs.trim()
        while self.used_bytes > self.caps.total_bytes:
            # A cap below the sum of the reserves wins over them.
            if not any(self._evict_from(owner, 0) for owner in self._victims(PUBLIC, hard=True)):
                break

    def check_integrity(self) -> None:
        """Assert that every slot has exactly one state and that the sums are right. O(slots)."""
        held = [entry.slot for _, _, entry in self.index]
        for slab in self.slabs:
            mine = [slot for other, slot in held if other is slab]
            stuck = [slot for number, slot in self.slabs.stuck if number == slab.number]
            slots = sorted([*mine, *stuck, *slab.holes, *slab.ready])
            # Slots that are being written, or read for the last time, are in no list.
            assert len(slots) == len(set(slots)), f"two states for a slot of {slab.path}"
            busy = self._writing.total() + self._unreleased
            assert busy or slots == list(range(slab.slots)), f"lost slots in {slab.path}"
        usage: Counter[Owner] = Counter()
        for owner, _, entry in self.index:
            usage[owner] += entry.bytes
        assert usage == self.index.usage, (usage, self.index.usage)
        assert self.index.total_bytes == usage.total()
        ready = sum(len(slab.ready) * slab.slot_bytes for slab in self.slabs)
        assert self.slabs.ready_bytes == ready, (self.slabs.ready_bytes, ready)

    def _take_or_evict(self, owner: Owner, slot_bytes: int) -> Slot | None:
        while True:
            room = self.caps.total_bytes - self.used_bytes
            try:
                slot = self.slabs.take(slot_bytes, room)
            except OSError as error:
                self._counters.add(reason_of(error))
                # A disk that is full before the cap is reached: go on within what we hold.
                if error.errno != errno.ENOSPC or not self._evict_for(owner, slot_bytes):
                    return None
                continue
            if slot is not None:
                return slot
            if self.slabs.trim(keep_slot_bytes=slot_bytes):
                continue
            if not self._evict_for(owner, slot_bytes):
                self._counters.add("no_room")
                return None

    def _evict_for(self, owner: Owner, slot_bytes: int) -> bool:
        return any(self._evict_from(victim, slot_bytes) for victim in self._victims(owner))

    def _victims(self, asking: Owner, hard: bool = False) -> list[Owner]:
        """Return who gives first; with ``hard``, those protected by a reserve come at the end."""
        victims = list(self._order(self.index.usage, self.caps, asking))
        return victims + self.index.owners() if hard else victims

    def _evict_from(self, owner: Owner, slot_bytes: int) -> bool:
        """Evict the least recently used page of ``owner`` whose slot can be had."""
        key = self.index.victim(owner)
        if key is None:
            return False
        slot = self._forget(owner, key).slot
        self._counters.add("evicted")
        slab = slot[0]
        if slab.slot_bytes == slot_bytes and not slab.frozen:
            self.slabs.recycle(slot)
        else:
            self._give_back(slot)
        return True

    def _forget(self, owner: Owner, key: bytes) -> Entry:
        self._writer.note(owner, key, None)
        return self.index.remove(owner, key)

    def _give_back(self, slot: Slot) -> None:
        if not self.slabs.give_back(slot):
            self._counters.add("stuck")
            self._writer.note_stuck(self.slabs.stuck)

    def _end_writing(self, owner: Owner, slot: Slot) -> None:
        self._writing[owner] -= slot[0].slot_bytes
        if not self._writing[owner]:
            del self._writing[owner]

    def _save(self, owner: Owner, key: bytes, entry: Entry) -> None:
        slab, slot = entry.slot
        entry.saved_access = entry.last_access
        self._writer.note(owner, key, Row(slab.number, slot, entry.bytes, entry.last_access))

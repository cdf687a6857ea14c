"""Which pages a store holds, in memory: by owner, least recently used first.

An owner's pages lie in a dictionary of their own, so that no look-up for one owner can find a page
of another, whatever the keys are. Not thread-safe.
"""

from collections import OrderedDict
from collections.abc import Iterator

from sglang_ext.tiering.slabs import Slot
from sglang_ext.types import Owner

__all__ = ["Entry", "PageIndex"]


class Entry:
    """One stored page: where it lies and when it was last used (seconds, wall clock)."""

    __slots__ = ("last_access", "readers", "removed", "saved_access", "slot")

    def __init__(self, slot: Slot, last_access: float) -> None:
        self.slot = slot
        self.last_access = last_access
        self.saved_access = last_access
        self.readers = 0
        self.removed = False
        """Not in the index any more; the last reader frees the slot."""

    @property
    def bytes(self) -> int:
        """Bytes on disk, header and rounding included."""
        return self.slot[0].slot_bytes


class PageIndex:
    """Owner -> key -> entry. Every method is O(1) unless it says otherwise."""

    def __init__(self) -> None:
        self._owners: dict[Owner, OrderedDict[bytes, Entry]] = {}
        self.usage: dict[Owner, int] = {}
        """Bytes on disk by owner; owners without a page are absent."""
        self.total_bytes = 0

    def __len__(self) -> int:
        return sum(map(len, self._owners.values()))

    def __iter__(self) -> Iterator[tuple[Owner, bytes, Entry]]:
        for owner, pages in self._owners.items():
            for key, entry in pages.items():
                yield owner, key, entry

    def owners(self) -> list[Owner]:
        """Return the owners that hold a page."""
        return list(self._owners)

    def find(self, owner: Owner, key: bytes) -> Entry | None:
        """Return the page without marking it as used."""
        pages = self._owners.get(owner)
        return pages.get(key) if pages else None

    def touch(self, owner: Owner, key: bytes, now: float) -> Entry | None:
        """Return the page and make it the most recently used of its owner."""
        pages = self._owners.get(owner)
        entry = pages.get(key) if pages else None
        if pages is None or entry is None:
            return None
        pages.move_to_end(key)
        # A clock that jumped back must not make a page look older than it is.
        entry.last_access = max(entry.last_access, now)
        return entry

    def add(self, owner: Owner, key: bytes, entry: Entry) -> None:
        """Add a page that is not there yet, as the most recently used one of its owner."""
        self._owners.setdefault(owner, OrderedDict())[key] = entry
        self.usage[owner] = self.usage.get(owner, 0) + entry.bytes
        self.total_bytes += entry.bytes

    def remove(self, owner: Owner, key: bytes) -> Entry:
        """Forget a page that is there."""
        pages = self._owners[owner]
        entry = pages.pop(key)
        entry.removed = True
        self.usage[owner] -= entry.bytes
        self.total_bytes -= entry.bytes
        if not pages:
            del self._owners[owner], self.usage[owner]
        return entry

    def oldest(self, owner: Owner) -> Iterator[tuple[bytes, Entry]]:
        """Yield pages of ``owner`` from the least recently used on; stop before changing it."""
        yield from self._owners.get(owner, {}).items()

    def victim(self, owner: Owner) -> bytes | None:
        """Return the least recently used page whose slot can be had now; None if there is none.

        Pages that are being read, or lie in a file that refuses writes, count as used just now, so
        that the next call need not pass them again: O(1) amortised.
        """
        for _ in range(len(self._owners.get(owner, ()))):
            key, entry = next(self.oldest(owner))
            if not entry.readers and not entry.slot[0].frozen:
                return key
            self._owners[owner].move_to_end(key)
        return None

    def keys(self, owner: Owner) -> list[bytes]:
        """Return all keys of ``owner``. O(pages of the owner)."""
        return list(self._owners.get(owner, ()))

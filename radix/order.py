"""Which leaf gives its pages next: a recency order for each owner, a strategy over the owners.

    LeafOrder ── owner a: oldest leaf ... newest leaf
              └─ owner b: oldest leaf ... newest leaf
                      └── the strategy is told each owner's oldest stamp and names the next owner

SGLang adds a leaf when its path is unlocked, touched, split or demoted, and discards it when it is
locked, covered by a child or gone. Each such change costs O(log leaves), so does each victim, and
nothing is ever rebuilt.
"""

from bisect import bisect_left
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from operator import itemgetter
from typing import Any, Protocol

from sglang_ext.types import Owner

__all__ = ["Leaf", "LeafOrder", "LeastRecent", "OwnerStrategy", "Recency"]

_CHUNK = 512
_last = itemgetter(-1)


class Leaf(Protocol):
    """What the order reads of a node. ``last_access_time`` only grows, and ``id`` is unique."""

    id: int
    last_access_time: float

    @property
    def owner(self) -> Owner: ...


Entry = tuple[float, int, Leaf]
"""A leaf under the stamp that it was filed with: older compares smaller, equal stamps by id."""


class OwnerStrategy(Protocol):
    """Decides which owner gives the next leaf of one tier."""

    def update(self, owner: Owner, oldest: float | None) -> None:
        """Take the new oldest stamp of ``owner``, None when it has no leaf left. O(log owners)."""

    def first(self) -> Owner | None:
        """Return who gives next, None when nobody may. Changes no order. O(log owners)."""


class LeastRecent:
    """The owner of the oldest leaf of all gives next: plain LRU, whoever owns what."""

    def __init__(self) -> None:
        self._oldest: dict[Owner, float] = {}
        self._heap: list[tuple[float, Owner]] = []

    def update(self, owner: Owner, oldest: float | None) -> None:
        if oldest is None:
            self._oldest.pop(owner, None)
            return
        self._oldest[owner] = oldest
        heappush(self._heap, (oldest, owner))
        # Replaced stamps stay until they surface; without a bound a hot owner would grow the heap.
        if len(self._heap) > 64 + 4 * len(self._oldest):
            self._heap = [(stamp, name) for name, stamp in self._oldest.items()]
            heapify(self._heap)

    def first(self) -> Owner | None:
        heap = self._heap
        while heap:
            stamp, owner = heap[0]
            if self._oldest.get(owner) == stamp:
                return owner
            heappop(heap)
        return None


class Recency:
    """A sorted list of entries in chunks, so that neither end nor middle costs O(n) moves."""

    __slots__ = ("_chunks",)

    def __init__(self) -> None:
        self._chunks: list[list[Entry]] = []

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def __iter__(self) -> Iterator[Entry]:
        for chunk in self._chunks:
            yield from chunk

    def oldest(self) -> Entry:
        """Return the first entry; the order must not be empty. O(1)."""
        return self._chunks[0][0]

    def add(self, entry: Entry) -> None:
        """File an entry that is not in the order. O(1) when it is the newest, else O(log n)."""
        chunks = self._chunks
        if not chunks:
            chunks.append([entry])
            return
        index = len(chunks) - 1
        chunk = chunks[index]
        if entry > chunk[-1]:
            chunk.append(entry)
        else:
            index = bisect_left(chunks, entry, key=_last)
            chunk = chunks[index]
            chunk.insert(bisect_left(chunk, entry), entry)
        if len(chunk) > 2 * _CHUNK:
            chunks.insert(index + 1, chunk[_CHUNK:])
            del chunk[_CHUNK:]

    def remove(self, entry: Entry) -> None:
        """Take out an entry that is in the order. O(log n)."""
        chunks = self._chunks
        index = bisect_left(chunks, entry, key=_last)
        chunk = chunks[index]
        del chunk[bisect_left(chunk, entry)]
        if not chunk:
            del chunks[index]


class LeafOrder(set[Any]):
    """The leaves of one tier that may go, in order; takes the place of SGLang's plain set.

    ``add`` files a leaf under its present stamp, again if it was touched since. Reading the set
    (``in``, iteration, comparison) is the built-in's.
    """

    def __init__(self, strategy: OwnerStrategy) -> None:
        super().__init__()
        self.strategy = strategy
        self._entries: dict[Leaf, Entry] = {}
        self._owners: dict[Owner, Recency] = {}

    def add(self, leaf: Leaf) -> None:
        filed = self._entries.get(leaf)
        if filed is not None:
            if filed[0] == leaf.last_access_time:
                return
            self.discard(leaf)
        entry = self._entries[leaf] = (leaf.last_access_time, leaf.id, leaf)
        super().add(leaf)
        order = self._owners.get(leaf.owner)
        if order is None:
            order = self._owners[leaf.owner] = Recency()
        order.add(entry)
        if order.oldest() is entry:
            self.strategy.update(leaf.owner, entry[0])

    def discard(self, leaf: Any) -> None:
        entry = self._entries.pop(leaf, None)
        if entry is None:
            return
        super().discard(leaf)
        order = self._owners[leaf.owner]
        was_oldest = order.oldest() is entry
        order.remove(entry)
        if not order:
            del self._owners[leaf.owner]
            self.strategy.update(leaf.owner, None)
        elif was_oldest:
            self.strategy.update(leaf.owner, order.oldest()[0])

    def oldest(self) -> Any | None:
        """Return the leaf that goes next, None when none may. O(log owners)."""
        owner = self.strategy.first()
        return None if owner is None else self._owners[owner].oldest()[2]

    def by_owner(self) -> dict[Owner, list[Entry]]:
        """Return every owner's entries, oldest first. A copy for checks and dumps, O(leaves)."""
        return {owner: list(order) for owner, order in self._owners.items()}

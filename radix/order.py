"""Which leaf gives its pages next: a recency order for each owner, a strategy over the owners.

    LeafOrder ── owner a: oldest leaf ... newest leaf
              └─ owner b: oldest leaf ... newest leaf
                      └── the strategy names the owner, the owner's oldest leaf goes

SGLang adds a leaf when its path is unlocked, touched, split or demoted, and discards it when it is
locked, covered by a child or gone. Nothing is ever rebuilt: a touch makes a leaf its owner's newest
in O(1); a leaf that joins with an older stamp, such as a parent that lost its last child, is filed
in O(log leaves).
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator
from enum import StrEnum
from heapq import heappop, heappush, heapreplace
from itertools import takewhile
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

from sglang_ext.types import Owner

__all__ = [
    "Leaf",
    "LeafOrder",
    "LeastRecent",
    "OwnerStrategy",
    "Reason",
    "Recency",
    "SortedEntries",
    "Terms",
]

_CHUNK = 512
_NOBODY: tuple[Owner | None, Any] = None, None
_set_add = set.add
_last = itemgetter(-1)


class Leaf(Protocol):
    """What the order reads of a node. ``last_access_time`` only grows, and ``id`` is unique."""

    id: int
    last_access_time: float

    @property
    def owner(self) -> Owner: ...


Entry = tuple[float, int, Leaf]
"""A leaf under the stamp that it was filed with: older compares smaller, equal stamps by id."""


class Reason(StrEnum):
    """Why pages left a tier."""

    QUOTA = "quota"
    """Their owner held more than its quota."""
    PRESSURE = "pressure"
    """Someone needed the room."""
    TTL = "ttl"
    FLUSH = "flush"

    __hash__ = str.__hash__  # a member's own hash is a function in Python


class Terms(NamedTuple):
    """On what terms an owner gives: at most so many tokens at once (None: any), and why."""

    most: int | None
    reason: Reason


_UNDER_PRESSURE = Terms(None, Reason.PRESSURE)


class OwnerStrategy(Protocol):
    """Decides which owner gives the next leaf of one tier."""

    def lowered(self, owner: Owner, oldest: float) -> None:
        """Take note that the oldest leaf of ``owner`` is now this one, older than the one before.

        Called for an owner's first leaf too; when its oldest leaf leaves or is touched, ``first``
        finds out. O(log owners).
        """

    def first(self, oldest: Callable[[Owner], float | None]) -> Owner | None:
        """Return who gives next, None when nobody may.

        ``oldest`` tells the stamp of an owner's oldest leaf, None when it has none. Amortised
        O(log owners).
        """

    def terms(self, owner: Owner) -> Terms:
        """Return the terms of the owner that ``first`` just named."""


class LeastRecent:
    """The owner of the oldest leaf of all gives next: plain LRU, whoever owns what."""

    def __init__(self) -> None:
        # One entry of the heap counts for each owner: a lower bound of its oldest stamp.
        self._bounds: dict[Owner, float] = {}
        self._heap: list[tuple[float, Owner]] = []

    def __contains__(self, owner: Owner) -> bool:
        return owner in self._bounds

    def lowered(self, owner: Owner, oldest: float) -> None:
        self._bounds[owner] = oldest
        heappush(self._heap, (oldest, owner))

    def first(self, oldest: Callable[[Owner], float | None]) -> Owner | None:
        heap = self._heap
        while heap:
            bound, owner = heap[0]
            if self._bounds.get(owner) != bound:
                heappop(heap)
                continue
            now = oldest(owner)
            if now == bound:
                return owner
            if now is None:
                heappop(heap)
                del self._bounds[owner]
            else:
                self._bounds[owner] = now
                heapreplace(heap, (now, owner))
        return None

    def terms(self, owner: Owner) -> Terms:
        return _UNDER_PRESSURE


class SortedEntries:
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
        """Return the first entry; there must be one. O(1)."""
        return self._chunks[0][0]

    def add(self, entry: Entry) -> None:
        """File an entry that is not there. O(log n)."""
        chunks = self._chunks
        index = min(bisect_left(chunks, entry, key=_last), len(chunks) - 1)
        if index < 0:
            chunks.append([entry])
            return
        chunk = chunks[index]
        chunk.insert(bisect_left(chunk, entry), entry)
        if len(chunk) > 2 * _CHUNK:
            chunks.insert(index + 1, chunk[_CHUNK:])
            del chunk[_CHUNK:]

    def remove(self, entry: Entry) -> None:
        """Take out an entry that is there. O(log n)."""
        chunks = self._chunks
        index = bisect_left(chunks, entry, key=_last)
        chunk = chunks[index]
        del chunk[bisect_left(chunk, entry)]
        if not chunk:
            del chunks[index]


class Recency:
    """The leaves of one owner, oldest first.

    ``recent`` grows at its end only, which is where touched and new leaves belong; ``late`` holds
    the few that joined with a stamp older than that end.
    """

    __slots__ = ("_filed", "late", "newest", "recent")

    def __init__(self) -> None:
        self.recent: OrderedDict[Leaf, float] = OrderedDict()
        self.late = SortedEntries()
        self._filed: dict[Leaf, Entry] = {}
        self.newest = 0.0

    def __bool__(self) -> bool:
        return bool(self.recent or self._filed)

    def __iter__(self) -> Iterator[tuple[float, Leaf]]:
        for leaf, stamp in self.recent.items():
            yield stamp, leaf
        for stamp, _, leaf in self.late:
            yield stamp, leaf

    def aged(self, is_old: Callable[[Leaf], bool]) -> list[Leaf]:
        """Return the leaves from the oldest on that are all old. O(those)."""
        late = (leaf for _, _, leaf in self.late)
        return [*takewhile(is_old, self.recent), *takewhile(is_old, late)]

    def stamp(self, leaf: Leaf) -> float:
        """Return the stamp that ``leaf`` is filed under. O(1)."""
        stamp = self.recent.get(leaf)
        return self._filed[leaf][0] if stamp is None else stamp

    def add(self, leaf: Leaf, stamp: float) -> bool:
        """File a leaf that is not there; tell whether it is the oldest now.

        O(1) for the newest, else O(log n).
        """
        recent = self.recent
        alone = not (recent or self._filed)
        if stamp >= self.newest:
            self.newest = recent[leaf] = stamp
            return alone
        lowers = alone or stamp < self.oldest()[0]
        entry = self._filed[leaf] = (stamp, leaf.id, leaf)
        self.late.add(entry)
        return lowers

    def touch(self, leaf: Leaf, stamp: float) -> None:
        """File a leaf that is there under a stamp newer than all others. O(1) if it was recent."""
        if leaf in self.recent:
            self.recent.move_to_end(leaf)
        else:
            self.remove(leaf)
        self.newest = self.recent[leaf] = stamp

    def remove(self, leaf: Leaf) -> None:
        """Take out a leaf that is there. O(1), O(log n) for one that joined late."""
        if self.recent.pop(leaf, None) is None:
            self.late.remove(self._filed.pop(leaf))

    def oldest(self) -> tuple[float, Leaf]:
        """Return the leaf that goes first and its stamp; there must be one. O(1)."""
        recent = self.recent
        if recent:
            leaf = next(iter(recent))
            stamp = recent[leaf]
            if not self._filed or stamp <= self.late.oldest()[0]:
                return stamp, leaf
        stamp, _, leaf = self.late.oldest()
        return stamp, leaf


class LeafOrder(set[Any]):
    """The leaves of one tier that may go, in order; takes the place of SGLang's plain set.

    ``add`` files a leaf under its present stamp, again if it was touched since. Reading the set
    (``in``, iteration, comparison) is the built-in's.
    """

    def __init__(self, strategy: OwnerStrategy) -> None:
        super().__init__()
        self.strategy = strategy
        self._owners: dict[Owner, Recency] = {}
        self._asked = _NOBODY

    def add(self, leaf: Leaf) -> None:
        owner, stamp = leaf.owner, leaf.last_access_time
        order = self._owners.get(owner)
        if order is None:
            order = self._owners[owner] = Recency()
        if leaf in self:
            if order.stamp(leaf) == stamp:
                return
            order.remove(leaf)
        else:
            _set_add(self, leaf)
        if order.recent and stamp >= order.newest:
            # Nearly all leaves join as their owner's newest; so no call for them.
            order.newest = order.recent[leaf] = stamp
        elif order.add(leaf, stamp):
            self.strategy.lowered(owner, stamp)

    def touch(self, leaf: Leaf) -> None:
        """File a leaf that is here again, as the newest: it was just touched. O(1) as a rule."""
        self._owners[leaf.owner].touch(leaf, leaf.last_access_time)

    def discard(self, leaf: Any) -> None:
        if leaf not in self:
            return
        set.discard(self, leaf)
        owner = leaf.owner
        order = self._owners[owner]
        order.remove(leaf)
        if not order:
            del self._owners[owner]

    def use(self, strategy: OwnerStrategy) -> None:
        """Let another strategy decide from now on. O(owners log owners)."""
        self.strategy = strategy
        for owner, order in self._owners.items():
            strategy.lowered(owner, order.oldest()[0])

    def oldest_of(self, owner: Owner) -> Any | None:
        """Return the oldest leaf of one owner, None when it has none. O(1)."""
        order = self._owners.get(owner)
        return None if order is None else order.oldest()[1]

    def oldest(self) -> Any | None:
        """Return the leaf that goes next, None when none may. Amortised O(log owners)."""
        owner = self.strategy.first(self._oldest_stamp)
        # A strategy mostly names the owner that it asked about last. Kept no longer than that: a
        # leaf that is gone must be freed.
        (asked, leaf), self._asked = self._asked, _NOBODY
        if owner is None:
            return None
        return leaf if asked == owner else self._owners[owner].oldest()[1]

    def _oldest_stamp(self, owner: Owner) -> float | None:
        order = self._owners.get(owner)
        if order is None:
            return None
        stamp, leaf = order.oldest()
        self._asked = owner, leaf
        return stamp

    def by_owner(self) -> dict[Owner, Recency]:
        """Return each owner's order, to be read only."""
        return dict(self._owners)

"""Room for pages in the shared store: who may write how much, and who gives for it."""

import threading
from collections.abc import Sequence

from sglang_ext.tiering.caps import Caps, VictimOrder
from sglang_ext.tiering.counters import Counters
from sglang_ext.tiering.remote_holdings import Holdings
from sglang_ext.tiering.remote_link import Link
from sglang_ext.tiering.remote_names import HeldPage
from sglang_ext.tiering.remote_objects import Objects
from sglang_ext.tiering.remote_transfers import Piece
from sglang_ext.types import Owner

__all__ = ["Room"]

_AT_ONCE = 64
"""Pages that are removed in one go when somebody needs room."""
_ASKED = 4
"""So many owners are asked for room, the furthest above its share first."""


class Room:
    """Keeps owners and the whole store within ``caps``; ``lock`` guards ``holdings``."""

    def __init__(
        self,
        caps: Caps,
        order: VictimOrder,
        page_bytes: int,
        objects: Objects,
        link: Link,
        holdings: Holdings,
        lock: threading.Lock,
        counters: Counters,
    ) -> None:
        self.caps = caps
        self._order = order
        self._page_bytes = page_bytes
        self._objects = objects
        self._link = link
        self._holdings = holdings
        self._lock = lock
        self._counters = counters

    def admit(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return as many of these as there is room for, after others, or the owner, gave some."""
        admitted: list[Piece] = []
        by_owner: dict[Owner, list[Piece]] = {}
        for piece in pieces:
            by_owner.setdefault(piece.owner, []).append(piece)
        for owner, own in by_owner.items():
            count = self._make(owner, len(own) * self._page_bytes) // self._page_bytes
            self._counters.add("no_room", len(own) - count)
            admitted += own[:count]
        return admitted

    def remove(self, pages: Sequence[HeldPage]) -> int:
        """Remove pages; how many there were. Raises StoreSilent."""
        removed = self._objects.remove([page.name for page in pages])
        with self._lock:
            for page in pages:
                self._holdings.forget(page)
        return removed

    def _make(self, owner: Owner, need: int) -> int:
        """Return how many of ``need`` bytes ``owner`` may write."""
        need = min(need, self.caps.ceiling(owner))
        while True:
            with self._lock:
                used, caps = dict(self._holdings.used), self.caps
            own_room = caps.ceiling(owner) - used.get(owner, 0)
            room = min(own_room, caps.total_bytes - sum(used.values()))
            if room >= need:
                return need
            victims = [owner] if own_room < need else self._order(used, caps, owner)
            if not any(self._take(victim, owner, need - room) for victim in victims[:_ASKED]):
                return max(0, room)

    def _take(self, victim: Owner, asking: Owner, need: int) -> bool:
        """Take some pages of a victim, of another not below its reserve; False where none go."""
        count = min(_AT_ONCE, -(-need // self._page_bytes))
        with self._lock:
            if victim != asking:
                above = self._holdings.used.get(victim, 0) - self.caps.limit(victim).reserve_bytes
                count = min(count, above // self._page_bytes)
            names = self._holdings.oldest(victim, count)
        pages = [HeldPage(name, victim, self._page_bytes) for name in names]
        removed = self._link.ask(lambda: self.remove(pages)) if pages else None
        self._counters.add("evicted", removed or 0)
        return removed is not None

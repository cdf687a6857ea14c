"""Pages with an end of their own: when each is to be looked at again, the next one first.

A use does not move an entry. Whoever keeps the time asks what is due, judges it anew and puts back
what was used since; so a page costs O(log n) once in its lifetime, however often it is used.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Any

from sglang_ext.types import Owner

__all__ = ["Deadlines", "Lifespan"]


class Lifespan:
    """``born_ms``: when the pages were computed. ``ttl_ms``: how long the last request that used
    them wants them kept, None for what the policy says. ``due_ms``: the entry that counts."""

    __slots__ = ("born_ms", "due_ms", "ttl_ms")

    def __init__(self, born_ms: int, ttl_ms: int | None = None) -> None:
        self.born_ms = born_ms
        self.ttl_ms = ttl_ms
        self.due_ms: int | None = None


class Deadlines:
    """The entries of one tree, by time and then by node id: the same order on every rank."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Any]] = []
        self._void = 0
        self.left_short: list[tuple[Owner, list[str]]] = []
        """Owner and page hashes of nodes that left memory before a client's shorter life was over;
        whoever keeps the time lets their copies below go too, and empties the list."""

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, node: Any, due_ms: int) -> None:
        """Look at ``node``, which has a lifespan, at that time; its former entry is void."""
        if node.lifespan.due_ms != due_ms:
            self.gone(node)
            node.lifespan.due_ms = due_ms
            heappush(self._heap, (due_ms, int(node.id), node))

    def gone(self, node: Any) -> None:
        """Make the entry of a node void. Amortised O(log n): void ones never outnumber the rest."""
        if node.lifespan.due_ms is None:
            return
        node.lifespan.due_ms = None
        self._void += 1
        if 2 * self._void > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].lifespan.due_ms == entry[0]]
            heapify(self._heap)
            self._void = 0

    def left(self, node: Any) -> None:
        """Note that a node with a lifespan is leaving memory."""
        self.gone(node)
        if node.lifespan.ttl_ms is not None and node.hash_value:
            self.left_short.append((node.owner, node.hash_value))

    def split(self, node: Any, parent: Any) -> None:
        """Give the new parent of a split node the lifespan that both had."""
        lifespan = node.lifespan
        parent.lifespan = Lifespan(lifespan.born_ms, lifespan.ttl_ms)
        if lifespan.due_ms is not None:
            self.set(parent, lifespan.due_ms)

    def due(self, now_ms: int) -> Iterator[Any]:
        """Take out the nodes whose time has come by now. O(log n) each, gone nodes included."""
        while self._heap and self._heap[0][0] <= now_ms:
            due_ms, _, node = heappop(self._heap)
            if node.lifespan.due_ms == due_ms:
                node.lifespan.due_ms = None
                yield node
            else:
                self._void -= 1

    def clear(self) -> None:
        """Forget all entries, together with the tree that they were in."""
        self._heap.clear()
        self.left_short.clear()
        self._void = 0

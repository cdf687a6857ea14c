"""Ends pages at a time of their own, whether or not anybody needs the room or still uses them.

Two things give a page such a time: a client's shorter lifetime (``X-KV-TTL``), which counts like
its tenant's TTL, and a policy with ``since: created``, under which every TTL counts from the moment
the page was computed. Both end in every tier at once. Under ``since: created`` with ``mode:
strict`` a page also leaves HBM and CPU at their own times, even between two uses.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from sglang_ext.radix.deadlines import Lifespan
from sglang_ext.radix.order import Reason
from sglang_ext.removal import below, free_nodes, is_there
from sglang_ext.tiering.placement import Lifetime
from sglang_ext.types import Owner, Tier

__all__ = ["Lifespans"]

_ROUND_MS = 100
_FOR_EVER_MS = 1 << 62


class Lifespans:
    """The executor of one cache's deadlines. Public text never ends."""

    def __init__(
        self,
        cache: Any,
        lifetimes: Mapping[Owner, Lifetime],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._cache = cache
        self._lifetimes = lifetimes
        self._wall_clock = wall_clock
        self._due_ms = 0
        self._asking: set[Owner] = set()
        """Owners of whom some request asked for a lifetime of its own."""
        tiers = [Tier.HBM]
        tiers += [Tier.CPU] if cache.cache_controller is not None else []
        tiers += [Tier.NVME] if cache.store is not None else []
        self._lowest = tiers[-1]

    def use(self, lifetimes: Mapping[Owner, Lifetime]) -> None:
        """Let other times hold; a page that has an end already keeps it until its next use."""
        self._lifetimes = lifetimes

    def used(self, node: Any, owner: Owner, ttl_ms: int | None) -> None:
        """Note that a request used the path to ``node`` and asked for ``ttl_ms``, or did not.

        The last request that used a page says how long it stays, at most as the policy says.
        O(path) for owners whose pages may have an end of their own, else O(1).
        """
        life, fixed = self._lifetimes.get(owner), self._is_fixed(owner)
        if life is not None and ttl_ms is not None and ttl_ms >= life.of(self._lowest):
            ttl_ms = None
        if ttl_ms is not None:
            self._asking.add(owner)
        if not fixed and owner not in self._asking:
            return
        while node.parent is not None and node.owner == owner:
            self._renew(node, fixed, ttl_ms)
            node = node.parent

    def tick(self, now_ms: int) -> None:
        """End what is over, and forget conversations that ended long ago.

        O(log n) for each page once in its lifetime, O(tenants with sessions); ten times a second.
        """
        if now_ms < self._due_ms:
            return
        self._due_ms = now_ms + _ROUND_MS
        for node in self._cache.deadlines.due(now_ms):
            self._judge(node, now_ms)
        left, store = self._cache.deadlines.left_short, self._cache.store
        for owner, pages in left if store is not None else ():
            store.delete_pages(owner, pages)
        left.clear()
        self._cache.sessions.forget_before(lambda owner: now_ms - self._longest_ms(owner))

    def _longest_ms(self, owner: Owner) -> int:
        """Return how long a page of ``owner`` may lie unused in the last tier."""
        life = self._lifetimes.get(owner)
        return _FOR_EVER_MS if life is None else life.of(self._lowest)

    def _renew(self, node: Any, fixed: bool, ttl_ms: int | None) -> None:
        if node.lifespan is None:
            if not fixed and ttl_ms is None:
                return
            node.lifespan = Lifespan(self._born_ms(node) if fixed else node.access_ms)
        node.lifespan.ttl_ms = ttl_ms
        due_ms, entry_ms = self._next_ms(node), node.lifespan.due_ms
        if due_ms is not None and (entry_ms is None or due_ms < entry_ms):
            self._cache.deadlines.set(node, due_ms)

    def _born_ms(self, node: Any) -> int:
        """Return when the pages were computed: now, or when the disk got them."""
        cache = self._cache
        if cache.store is None or not node.hash_value:
            return int(node.access_ms)
        written = cache.store.written(node.owner, node.hash_value[0])
        age_s = 0.0 if written is None else max(0.0, self._wall_clock() - written)
        (age_ms,) = cache.most_of_all_ranks([round(age_s * 1000)])
        return int(node.access_ms - age_ms)

    def _ends(self, node: Any) -> dict[Tier | None, int]:
        """Return when the pages leave HBM and CPU, and under None every tier."""
        span, life = node.lifespan, self._lifetimes.get(node.owner)
        start = span.born_ms if life is not None and life.fixed else node.access_ms
        ends: dict[Tier | None, int] = {}
        if life is not None and life.fixed:
            ends[None] = start + life.of(self._lowest)
            if life.strict:
                ends |= {tier: start + life.of(tier) for tier in (Tier.HBM, Tier.CPU)}
        if span.ttl_ms is not None:
            ends[None] = min(ends.get(None, start + span.ttl_ms), start + span.ttl_ms)
        return ends

    def _next_ms(self, node: Any) -> int | None:
        """Return the first of its ends in a tier that holds the pages."""
        ends, held = self._ends(node), node.tiers
        return min(
            (end for tier, end in ends.items() if tier is None or tier in held), default=None
        )

    def _judge(self, node: Any, now_ms: int) -> None:
        """Free what is over; a page that stays is looked at again at its next end."""
        over = [tier for tier, end in self._ends(node).items() if end <= now_ms]
        wait_ms = _ROUND_MS
        if None in over and node.children and not self._is_fixed(node.owner):
            # Another request continued it without asking for a shorter life: it goes after that.
            wait_ms = max(_ROUND_MS, node.lifespan.ttl_ms)
        elif None in over:
            self._end(below(node), now_ms)
        elif over:
            tiers = [tier for tier in over if tier is not None]
            free_nodes(self._cache, below(node), tiers, Reason.TTL, copied=True)
        next_ms = self._next_ms(node)
        if is_there(self._cache, node) and next_ms is not None:
            self._cache.deadlines.set(node, max(next_ms, now_ms + wait_ms))

    def _end(self, nodes: list[Any], now_ms: int) -> None:
        """Free a page and what continues it, children first, in every tier."""
        top = nodes[-1]
        parent = top.parent
        if self._cache.store is not None:
            pages = [page for node in nodes for page in node.hash_value or ()]
            self._cache.store.delete_pages(top.owner, pages)
        with self._cache.sessions.dropping():
            free_nodes(self._cache, nodes, (Tier.HBM, Tier.CPU), Reason.TTL)
        if parent.lifespan is not None and not parent.children:
            self._cache.deadlines.set(parent, now_ms)

    def _is_fixed(self, owner: Owner) -> bool:
        life = self._lifetimes.get(owner)
        return life is not None and life.fixed

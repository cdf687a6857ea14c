"""Takes the next victim of a tier, no more of it than its owner gives, and counts what left."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from sglang_ext.radix.eviction import FairOrder
from sglang_ext.radix.order import LeafOrder, LeastRecent, OwnerStrategy, Reason
from sglang_ext.radix.shares import Shares
from sglang_ext.types import Owner, Tier

__all__ = ["Eviction", "Victim", "Victims"]


class Eviction(NamedTuple):
    """What the counter of evicted tokens is kept by."""

    owner: Owner
    tier: Tier
    reason: Reason


class Victim(NamedTuple):
    """A leaf about to go, and what to count when it has gone."""

    node: Any
    tokens: int
    eviction: Eviction


class Victims:
    """The victims of one tree. ``evicted`` counts tokens since the start, over all flushes.

    ``only``: while set, just this owner's leaves go, page by page and reserve or not.
    """

    def __init__(self, core: Any) -> None:
        self.evicted: Counter[Eviction] = Counter()
        self.shares: dict[Tier, Shares] = {}
        self.only: Owner | None = None
        self._core = core

    def strategy(self, tier: Tier) -> OwnerStrategy:
        """Return a new strategy for an order of ``tier``: by recency alone where nothing limits."""
        return FairOrder(self.shares[tier]) if tier in self.shares else LeastRecent()

    def limit(self, shares: Mapping[Tier, Shares]) -> None:
        """Let these shares decide in the tiers that they name. O(owners log owners)."""
        self.shares = dict(shares)
        self._core.evictable_device_leaves.use(self.strategy(Tier.HBM))
        self._core.evictable_host_leaves.use(self.strategy(Tier.CPU))

    @contextmanager
    def of(self, owner: Owner) -> Iterator[None]:
        """Within, only ``owner`` gives."""
        self.only = owner
        try:
            yield
        finally:
            self.only = None

    def choose(self, tier: Tier, wanted: int, cache_actions: list[Any]) -> Victim | None:
        """Return who goes next to free ``wanted`` tokens, None when nobody may.

        Cuts a leaf of which only a part may go, O(leaf). Amortised O(log owners) otherwise.
        """
        on_device = tier is Tier.HBM
        core = self._core
        leaves: LeafOrder = (
            core.evictable_device_leaves if on_device else core.evictable_host_leaves
        )
        leaf = leaves.oldest() if self.only is None else leaves.oldest_of(self.only)
        if leaf is None:
            return None
        owner, size = leaf.owner, len(leaf.key)
        if self.only is None:
            most, reason = leaves.strategy.terms(owner)
        else:
            most, reason = -(-wanted // core.page_size) * core.page_size, Reason.QUOTA
        if most is not None and most < size:
            core.cut(leaf, size - most, cache_actions)
        return Victim(leaf, len(leaf.key), Eviction(owner, tier, reason))

    def gone(self, victim: Victim) -> None:
        """Count a victim that left its tier."""
        self.evicted[victim.eviction] += victim.tokens

    def flushed(self) -> None:
        """Count everything that the tree holds as flushed; it is about to forget it."""
        for owner, tier, usage in self._core.ledger:
            tokens = usage.evictable + usage.protected
            if tokens:
                self.evicted[Eviction(owner, tier, Reason.FLUSH)] += tokens

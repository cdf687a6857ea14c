"""Takes the next victim of a tier, no more of it than its owner gives, and counts what left."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from sglang_ext.radix.eviction import FairOrder
from sglang_ext.radix.expiry import ExpiredFirst
from sglang_ext.radix.order import LeafOrder, LeastRecent, OwnerStrategy, Reason
from sglang_ext.radix.shares import Shares
from sglang_ext.types import Owner, Tier

__all__ = ["Eviction", "Victim", "Victims"]


_HBM = Tier.HBM  # an enum's members are slow to read
_tuple = tuple.__new__  # without the Python function that a named tuple is made by


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

    ``only``: while set, just this owner's leaves go, page by page and reserve or not. ``expired``
    names, by tier, the owners that may have an expired leaf; whoever keeps the time fills it.
    """

    def __init__(self, core: Any) -> None:
        self.evicted: Counter[Eviction] = Counter()
        self.shares: dict[Tier, Shares] = {}
        self.only: Owner | None = None
        self.expired: dict[Tier, set[Owner]] = {Tier.HBM: set(), Tier.CPU: set()}
        self._is_expired: Callable[[Tier, Any], bool] | None = None
        self._reason = Reason.QUOTA
        self._core = core

    def strategy(self, tier: Tier) -> OwnerStrategy:
        """Return a new strategy for an order of ``tier``: by recency alone where nothing limits."""
        shares = self.shares.get(tier)
        inner: OwnerStrategy = LeastRecent() if shares is None else FairOrder(shares)
        is_expired = self._is_expired
        if is_expired is None:
            return inner
        return ExpiredFirst(
            inner,
            self.expired[tier],
            lambda owner: is_expired(tier, self.leaves(tier).oldest_of(owner)),
            lambda owner: shares is None or shares.account(owner).spare > 0,
        )

    def leaves(self, tier: Tier) -> LeafOrder:
        """Return the order of the leaves of ``tier``, HBM or CPU."""
        core = self._core
        order: LeafOrder = (
            core.evictable_device_leaves if tier is _HBM else core.evictable_host_leaves
        )
        return order

    def limit(self, shares: Mapping[Tier, Shares]) -> None:
        """Let these shares decide in the tiers that they name. O(owners log owners)."""
        self.shares = dict(shares)
        self._renew()

    def expire(self, is_expired: Callable[[Tier, Any], bool]) -> None:
        """Let leaves go first of which this says, by tier, that their time is over.

        A leaf may be None, which is never expired. O(owners log owners).
        """
        self._is_expired = is_expired
        self._renew()

    def _renew(self) -> None:
        for tier in (Tier.HBM, Tier.CPU):
            self.leaves(tier).use(self.strategy(tier))

    @contextmanager
    def of(self, owner: Owner, reason: Reason = Reason.QUOTA) -> Iterator[None]:
        """Within, only ``owner`` gives, for this reason."""
        self.only, self._reason = owner, reason
        try:
            yield
        finally:
            self.only = None

    def choose(self, tier: Tier, wanted: int, cache_actions: list[Any]) -> Victim | None:
        """Return who goes next to free ``wanted`` tokens, None when nobody may.

        Cuts a leaf of which only a part may go, O(leaf). Amortised O(log owners) otherwise.
        """
        core, leaves = self._core, self.leaves(tier)
        leaf = leaves.oldest() if self.only is None else leaves.oldest_of(self.only)
        if leaf is None:
            return None
        key = leaf.key
        owner, size = key.owner, key.size
        if self.only is None:
            most, reason = leaves.strategy.terms(owner)
        else:
            most, reason = -(-wanted // core.page_size) * core.page_size, self._reason
        if most is not None and most < size:
            core.cut(leaf, size - most, cache_actions)
            size = leaf.key.size
        return _tuple(Victim, (leaf, size, _tuple(Eviction, (owner, tier, reason))))

    def gone(self, victim: Victim) -> None:
        """Count a victim that left its tier."""
        self.evicted[victim.eviction] += victim.tokens

    def left(self, owner: Owner, tier: Tier, tokens: int, reason: Reason) -> None:
        """Count tokens that left a tier without having been chosen here."""
        self.evicted[Eviction(owner, tier, reason)] += tokens

    def flushed(self) -> None:
        """Count everything that the tree holds as flushed; it is about to forget it."""
        for owner, tier, usage in self._core.ledger:
            tokens = usage.evictable + usage.protected
            if tokens:
                self.evicted[Eviction(owner, tier, Reason.FLUSH)] += tokens

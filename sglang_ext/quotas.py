"""Quotas and reserves of one cache: who may run how much, and who must give at once."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_ext.errors import UnsupportedError
from sglang_ext.radix.shares import Shares
from sglang_ext.tenancy.quota import QuotaBook
from sglang_ext.types import Owner, OwnerLimits, Tier

__all__ = ["Quotas", "check_books"]


class Quotas:
    """What the quota books of ``cache`` mean for its tree. Without books nothing is limited."""

    def __init__(self, cache: Any, books: Iterable[QuotaBook] = ()) -> None:
        """Raise UnsupportedError where the model keeps state that quotas cannot follow."""
        self._cache = cache
        self.shares: dict[Tier, Shares] = {}
        books = list(books)
        check_books(cache, books)
        for book in books:
            self.shares[book.tier] = Shares(
                cache.ledger,
                book.tier,
                book.limits,
                book.capacity,
                book.reserved,
                cache.page_size,
            )
        if self.shares:
            cache.tree_core.victims.limit(self.shares)

    def limits(self, owner: Owner, tier: Tier) -> OwnerLimits:
        shares = self.shares.get(tier)
        return OwnerLimits() if shares is None else shares.limits(owner)

    @contextmanager
    def requested_by(self, incoming: Mapping[Owner, int], *tiers: Tier) -> Iterator[None]:
        """Within, room in ``tiers`` is made for these owners, who get so many tokens."""
        with ExitStack() as stack:
            for tier in tiers:
                if tier in self.shares:
                    stack.enter_context(self.shares[tier].asked_by(incoming))
            yield

    def withheld(self) -> int:
        """Return the evictable tokens of HBM that are not to be freed for the requesters."""
        shares = self.shares.get(Tier.HBM)
        return 0 if shares is None else shares.withheld()

    def headroom(self, owner: Owner) -> int:
        cache = self._cache
        with self.requested_by({owner: 0}, Tier.HBM):
            room = cache.token_to_kv_pool_allocator.available_size() + cache.evictable_size()
        shares = self.shares.get(Tier.HBM)
        return int(room if shares is None else max(0, min(room, shares.headroom(owner))))

    def largest(self, owner: Owner) -> tuple[int, str]:
        """Return the most tokens that ``owner`` could ever run at once, and what sets the bound."""
        pool = int(self._cache.token_to_kv_pool_allocator.size)
        shares, limits = self.shares.get(Tier.HBM), self.limits(owner, Tier.HBM)
        if shares is None:
            return pool, "the whole pool"
        room, bound = shares.capacity - (shares.reserved - limits.reserve), "the whole pool"
        if room < shares.capacity:
            # Public pages above a reserved page cannot go, however much room a request needs.
            room, bound = (
                room - self._cache.tree_core.public.tokens,
                "what nobody else has reserved",
            )
        if limits.hard and limits.quota is not None and limits.quota <= room:
            room, bound = limits.quota, "its hard quota"
        return max(0, room), bound

    def enforce(self, owner: Owner, tier: Tier, incoming: int = 0) -> int:
        """Evict the owner's oldest pages until a hard quota holds what it has and ``incoming``.

        Returns how many tokens are still too many: those that are locked or running. O(1) when
        nothing is, else O(log leaves) a leaf.
        """
        shares = self.shares.get(tier)
        if shares is None:
            return 0
        excess = self._excess(shares, owner, incoming)
        if excess > 0 and shares.account(owner).evictable:
            with self._cache.tree_core.victims.of(owner):
                self._evict(tier, excess)
            excess = self._excess(shares, owner, incoming)
        return max(0, excess)

    def enforce_all(self) -> None:
        """Bring every owner under its hard quotas. O(owners above one)."""
        for tier, shares in self.shares.items():
            shares.settle()
            for owner in sorted(shares.beyond_hard):
                self.enforce(owner, tier)

    @staticmethod
    def _excess(shares: Shares, owner: Owner, incoming: int) -> int:
        account = shares.account(owner)
        quota = account.limits.quota
        if quota is None or not account.limits.hard:
            return 0
        return account.held + incoming - quota

    def _evict(self, tier: Tier, tokens: int) -> None:
        if tier is Tier.HBM:
            self._cache.evict(EvictParams(num_tokens=tokens))
        else:
            self._cache.evict_host(tokens)


def check_books(cache: Any, books: Iterable[QuotaBook]) -> None:
    """Raise UnsupportedError where the model keeps state that these quotas cannot follow."""
    for book in books:
        _refuse_hybrid(cache, book)


def _refuse_hybrid(cache: Any, book: QuotaBook) -> None:
    strict = any(limits.reserve or limits.hard for limits in book.owners.values())
    if strict and len(cache.tree_components) > 1:
        raise UnsupportedError(
            f"reserve.{book.tier} and hard quotas do not work with this model: its window or state "
            "pools are evicted without regard to owners; remove them from the tenant policy"
        )

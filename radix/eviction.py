"""Whose leaf goes next when owners have quotas, reserves and weights.

Rule 1, leaves past their TTL, belongs to a strategy in front of this one. Then:

    2  owners above their quota, the furthest above first
    3  owners above their fair share: basic before standard before premium, in a class the one that
       holds most for its weight
    4  all others that hold more than their reserve: the oldest leaf of all
    5  pages inside a reserve: only for requesters, the oldest first

Rules 2 to 4 take no page inside a reserve, not even a requester's: it grows to its reserve at the
cost of others, and rolls over its own pages only when nothing else is left.

Cost. Rules 2 and 3 keep owners in heaps by a number that depends on that owner's holdings alone:
tokens above the quota, tokens above the reserve for each unit of weight. (The latter is above the
fair share for the first k owners of the order, whatever the share is, so that the share may move
with every owner that comes or goes without a single entry moving.) A change of the ledger costs
O(1) when it happens and O(log owners) once, when the next victim is asked for; however often an
owner changed in between, it is filed once. A victim changes one owner, so it costs O(log owners)
amortised with any number of owners, leaves and requesters; only rule 5 looks at each requester.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from sglang_ext.radix.order import LeastRecent, Reason, Terms
from sglang_ext.radix.shares import Account, Shares
from sglang_ext.types import Owner

__all__ = ["FairOrder", "OwnerHeap"]

_RANKS = 3
_SLACK = 16

Oldest = Callable[[Owner], float | None]


class OwnerHeap:
    """Owners by a number, the largest first, equal ones by name."""

    def __init__(self) -> None:
        self._numbers: dict[Owner, float] = {}
        self._heap: list[tuple[float, Owner]] = []

    def file(self, owner: Owner, number: float | None) -> None:
        """Set an owner's number, None to take it out. Amortised O(log owners)."""
        if self._numbers.get(owner) == number:
            return
        if number is None:
            del self._numbers[owner]
            return
        self._numbers[owner] = number
        heappush(self._heap, (-number, owner))
        if len(self._heap) > 2 * len(self._numbers) + _SLACK:
            self._heap = [(-number, owner) for owner, number in self._numbers.items()]
            heapify(self._heap)

    def largest(self) -> Owner | None:
        """Return the owner with the largest number. Amortised O(log owners)."""
        while self._heap:
            number, owner = self._heap[0]
            if self._numbers.get(owner) == -number:
                return owner
            heappop(self._heap)
        return None


class FairOrder:
    """The strategy of one tier. An owner without leaves is in no heap."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._above_quota = OwnerHeap()
        self._by_rank = tuple(OwnerHeap() for _ in range(_RANKS))
        self._recency = LeastRecent()

    def lowered(self, owner: Owner, oldest: float) -> None:
        self._recency.lowered(owner, oldest)
        self._shares.unfiled.add(owner)

    def first(self, oldest: Oldest) -> Owner | None:
        self._file_changed(oldest)
        for rule in (self._above_quota_first, self._above_share_first, self._least_recent):
            owner = rule(oldest)
            if owner is not None:
                return owner
        return self._requester(oldest)

    def terms(self, owner: Owner) -> Terms:
        account = self._shares.account(owner)
        quota = account.limits.quota
        above = quota is not None and account.held > quota
        return Terms(account.spare or None, Reason.QUOTA if above else Reason.PRESSURE)

    def _file_changed(self, oldest: Oldest) -> None:
        self._shares.settle()
        unfiled = self._shares.unfiled
        while unfiled:
            owner = unfiled.pop()
            stamp = oldest(owner)
            account = self._shares.account(owner)
            self._file(owner, account, stamp is not None and account.spare > 0)
            if stamp is not None and owner not in self._recency:
                self._recency.lowered(owner, stamp)

    def _file(self, owner: Owner, account: Account, may_give: bool) -> None:
        limits = account.limits
        above = 0 if limits.quota is None else account.held - limits.quota
        self._above_quota.file(owner, above if may_give and above > 0 else None)
        for rank, heap in enumerate(self._by_rank):
            measured = may_give and account.weight and rank == limits.rank
            for_weight = (account.held - limits.reserve) / account.weight if measured else None
            heap.file(owner, for_weight)

    def _holding(self, heap: OwnerHeap, oldest: Oldest) -> Owner | None:
        """Return the largest owner that has a leaf; those without wait for ``lowered``."""
        while (owner := heap.largest()) is not None and oldest(owner) is None:
            heap.file(owner, None)
        return owner

    def _above_quota_first(self, oldest: Oldest) -> Owner | None:
        return self._holding(self._above_quota, oldest)

    def _above_share_first(self, oldest: Oldest) -> Owner | None:
        for heap in self._by_rank:
            owner = self._holding(heap, oldest)
            if owner is not None and self._shares.above_share(self._shares.account(owner)):
                return owner
        return None

    def _least_recent(self, oldest: Oldest) -> Owner | None:
        account = self._shares.account
        return self._recency.first(lambda owner: oldest(owner) if account(owner).spare else None)

    def _requester(self, oldest: Oldest) -> Owner | None:
        stamps = ((oldest(owner), owner) for owner in self._shares.requesters)
        holding = [(stamp, owner) for stamp, owner in stamps if stamp is not None]
        return min(holding)[1] if holding else None

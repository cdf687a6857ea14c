"""What owners of a tier may keep, what others may take from them, and what they may still get.

    held      = evictable + fixed          what the ledger says; fixed = locked, pinned or running
    floor     = the part of evictable that lies inside the reserve, in whole pages
    spare     = evictable - floor          what anybody may take
    claim     = max(reserve, fixed)        where nobody else may run

Two promises rest on these numbers, relative to the owners that ask (the requesters):

1. ``withheld``: all evictable tokens but these can be freed. A private owner's evictable pages hang
   together downwards (what lies below an unlocked page is unlocked and its own), so leaf by leaf,
   with the last leaf cut at a page, exactly its spare can go, or everything when it is a requester.
   A public page can go once everything below it has gone, so public pages count only while no
   floor is withheld. More requesters never withhold more: what was promised to one request of a
   batch holds for the batch as a whole.
2. Between the promise and the eviction nothing may withhold more. A lock, an unlock, a request that
   turns running tokens into pages or gives them back: each leaves ``free + evictable - floor`` of
   every owner where it was or raises it, because floor + fixed stays or grows by no more than what
   became evictable or free. Only new running tokens lower it, and they are what was asked for.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from sglang_ext.radix.ledger import Ledger
from sglang_ext.types import PUBLIC, Owner, OwnerLimits, Tier

__all__ = ["Account", "Shares"]

_WEIGHT_UNITS = 1000
"""Weights count in thousandths, so that sums of them are exact."""


class Account(NamedTuple):
    """One owner's numbers in a tier, in tokens; ``weight`` in thousandths."""

    limits: OwnerLimits
    evictable: int
    fixed: int
    floor: int
    weight: int

    @property
    def held(self) -> int:
        return self.evictable + self.fixed

    @property
    def spare(self) -> int:
        """What anybody may take, in whole pages."""
        return self.evictable - self.floor

    @property
    def over_reserve(self) -> int:
        """Fixed tokens beyond the reserve: room that no reserve accounts for."""
        return max(0, self.fixed - self.limits.reserve)


_NOTHING = Account(OwnerLimits(), 0, 0, 0, 0)


class Shares:
    """Follows the ledger of one tier. ``requesters`` are those for whom room is made just now.

    Nothing is computed when the ledger changes; the next question settles the owners that changed,
    each in O(1). ``unsettled`` is the ledger's set of these, ``unfiled`` those that the order of
    victims has not looked at yet, ``beyond_hard`` those that hold more than a hard quota.
    """

    def __init__(
        self,
        ledger: Ledger,
        tier: Tier,
        limits: Callable[[Owner], OwnerLimits],
        capacity: int,
        reserved: int = 0,
        page_size: int = 1,
    ) -> None:
        """``capacity``: tokens of the tier; ``reserved``: all reserves in it, held or not."""
        self.tier, self.limits, self.capacity, self.reserved = tier, limits, capacity, reserved
        self.page_size = page_size
        self.requesters: frozenset[Owner] = frozenset()
        self.incoming: Mapping[Owner, int] = {}
        self.unfiled: set[Owner] = set()
        self.beyond_hard: set[Owner] = set()
        self._ledger = ledger
        self._unsettled = ledger.watch(tier)
        self._accounts: dict[Owner, Account] = {}
        self._floors = 0
        self._over_reserves = 0
        self._weight = 0

    @contextmanager
    def asked_by(self, incoming: Mapping[Owner, int]) -> Iterator[None]:
        """Within, these owners are the requesters and hold so many more tokens: what they ask for.

        Else one large request could take from owners below their share before it counts.
        """
        before = self._ask(incoming)
        try:
            yield
        finally:
            self._ask(before)

    def _ask(self, incoming: Mapping[Owner, int]) -> Mapping[Owner, int]:
        before, self.incoming = self.incoming, incoming
        self.requesters = frozenset(incoming)
        self._unsettled.update(before, incoming)
        return before

    def account(self, owner: Owner) -> Account:
        """Return the numbers of ``owner`` now. Amortised O(1) for each change of the ledger."""
        self.settle()
        return self._accounts.get(owner) or _NOTHING._replace(limits=self.limits(owner))

    def withheld(self) -> int:
        """Return the evictable tokens that ``evict`` will not free for these requesters."""
        self.settle()
        floors = self._floors - sum(self.account(owner).floor for owner in self.requesters)
        return floors + self.account(PUBLIC).evictable if floors else 0

    def headroom(self, owner: Owner) -> int:
        """Return how many more tokens ``owner`` may fix here by its quota and all reserves.

        By a hard quota: the quota less what it has fixed; its own cached pages make room. By the
        tier: the capacity less what it has fixed, less the claims of all others. Others' cached
        pages in an unused reserve do not matter here, they leave when its owner comes; fixed tokens
        would not, so they are kept out. May be negative. O(1).
        """
        account = self.account(owner)
        claims = self.reserved + self._over_reserves
        own_claim = max(account.limits.reserve, account.fixed)
        room = self.capacity - (claims - own_claim) - account.fixed
        if account.limits.hard and account.limits.quota is not None:
            room = min(room, account.limits.quota - account.fixed)
        return room

    def above_share(self, account: Account) -> bool:
        """Tell whether an owner holds more than its fair share.

        The share: its reserve, and of what no reserve takes the part of its weight among all owners
        that hold something here. Who has no quota is not measured.
        """
        above = (account.held - account.limits.reserve) * self._weight
        return account.weight > 0 and above > (self.capacity - self.reserved) * account.weight

    def settle(self) -> None:
        """Take in what changed in the ledger. O(owners that changed)."""
        while self._unsettled:
            owner = self._unsettled.pop()
            self.unfiled.add(owner)
            self._replace(owner, self._read(owner))

    def _read(self, owner: Owner) -> Account:
        usage, limits = self._ledger.usage(owner, self.tier), self.limits(owner)
        fixed = usage.protected + usage.running + self.incoming.get(owner, 0)
        pages = -(-max(0, limits.reserve - fixed) // self.page_size)
        floor = min(usage.evictable, pages * self.page_size)
        measured = usage.evictable + fixed > 0 and limits.quota is not None
        weight = max(1, round(limits.weight * _WEIGHT_UNITS)) if measured else 0
        return Account(limits, usage.evictable, fixed, floor, weight)

    def _replace(self, owner: Owner, now: Account) -> None:
        was = self._accounts.pop(owner, _NOTHING)
        if now.held:
            self._accounts[owner] = now
        quota = now.limits.quota if now.limits.hard else None
        if quota is not None and now.held > quota:
            self.beyond_hard.add(owner)
        else:
            self.beyond_hard.discard(owner)
        self._floors += now.floor - was.floor
        self._over_reserves += now.over_reserve - was.over_reserve
        self._weight += now.weight - was.weight

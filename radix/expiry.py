"""Rule 1 of the order of victims: leaves that outlived their time go before any other.

It stands in front of another strategy. Who has an expired leaf is found by whoever keeps the time
(O(owners), now and then); between two such rounds owners only fall out, as soon as their oldest
leaf is no longer expired. Reserves hold here too: an owner gives what it has to spare.

Of several owners with expired leaves the one whose oldest leaf was not used for longest gives
first. Where most of what a tier holds has outlived its time, as in any tier that is large for its
load, victims are thus those of plain LRU, which finds the most hits; shares decide about the rest.
Amortised O(log owners) a victim.
"""

from collections.abc import Callable

from sglang_ext.radix.order import LeastRecent, OwnerStrategy, Reason, Terms
from sglang_ext.types import Owner

__all__ = ["ExpiredFirst"]


class ExpiredFirst:
    """The strategy of one tier.

    ``owners`` may have an expired leaf, others have none; it is emptied as they are taken note of.
    """

    def __init__(
        self,
        inner: OwnerStrategy,
        owners: set[Owner],
        is_expired: Callable[[Owner], bool],
        may_give: Callable[[Owner], bool],
    ) -> None:
        """``is_expired`` tells about an owner's oldest leaf, ``may_give`` about its reserve."""
        self._inner = inner
        self._owners = owners
        self._is_expired = is_expired
        self._may_give = may_give
        self._recency = LeastRecent()
        self._chosen: Owner | None = None

    def lowered(self, owner: Owner, oldest: float) -> None:
        if owner in self._recency:
            self._recency.lowered(owner, oldest)
        self._inner.lowered(owner, oldest)

    def first(self, oldest: Callable[[Owner], float | None]) -> Owner | None:
        self._chosen = self._expired_owner(oldest)
        return self._inner.first(oldest) if self._chosen is None else self._chosen

    def terms(self, owner: Owner) -> Terms:
        terms = self._inner.terms(owner)
        return terms._replace(reason=Reason.TTL) if owner == self._chosen else terms

    def _expired_owner(self, oldest: Callable[[Owner], float | None]) -> Owner | None:
        """Return the one that gives; who does not is asked again after the next round."""
        while self._owners:
            owner = self._owners.pop()
            stamp = oldest(owner)
            if stamp is not None and owner not in self._recency:
                self._recency.lowered(owner, stamp)
        return self._recency.first(lambda owner: self._expired_stamp(owner, oldest))

    def _expired_stamp(self, owner: Owner, oldest: Callable[[Owner], float | None]) -> float | None:
        stamp = oldest(owner)
        gives = stamp is not None and self._is_expired(owner) and self._may_give(owner)
        return stamp if gives else None

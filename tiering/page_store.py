"""What every store of pages does, and two of them used as one."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from sglang_ext.tiering.transfers import Deliver, Fill, PageRef
from sglang_ext.types import Owner

__all__ = ["LocalFirst", "PageStore"]


class PageStore(Protocol):
    """Pages by owner and key. Thread-safe; whatever goes wrong is a miss and a counter."""

    @property
    def counters(self) -> Mapping[str, int]: ...

    def put_batch(
        self,
        refs: Sequence[PageRef],
        sizes: Sequence[int],
        fill: Fill,
        timeout_s: float | None = None,
    ) -> list[bool]: ...

    def get_batch(
        self, refs: Sequence[PageRef], deliver: Deliver, timeout_s: float | None = None
    ) -> list[bool]: ...

    def contains_batch(self, refs: Sequence[PageRef]) -> list[bool]: ...

    def find_owner(self, key: bytes, candidates: Iterable[Owner]) -> Owner | None:
        """Return the first of ``candidates`` that holds a page called ``key``."""
        refs = [PageRef(owner, key) for owner in candidates]
        found = zip(refs, self.contains_batch(refs), strict=True)
        return next((ref.owner for ref, there in found if there), None)

    def owners(self) -> list[Owner]: ...

    def usage(self, owner: Owner) -> int: ...

    def delete(self, refs: Sequence[PageRef]) -> int: ...

    def delete_owner(self, owner: Owner) -> int: ...

    def expire(self, owner: Owner, before: float) -> int: ...

    def check_integrity(self) -> None: ...

    def close(self) -> None: ...


class LocalFirst:
    """Writes to this machine's store and to a shared one, which is asked for what is missing here.

    Neither keeps the other from working.
    """

    def __init__(self, local: PageStore, remote: PageStore | None) -> None:
        self._local = local
        self._remote = remote

    def put_batch(self, refs: Sequence[PageRef], sizes: Sequence[int], fill: Fill) -> list[bool]:
        """Store pages in both; True for each that is in one of them."""
        here = self._local.put_batch(refs, sizes, fill)
        if self._remote is None:
            return here
        there = self._remote.put_batch(refs, sizes, fill)
        return [one or other for one, other in zip(here, there, strict=True)]

    def get_batch(self, refs: Sequence[PageRef], deliver: Deliver) -> list[bool]:
        """Read pages from wherever they are; True for each that was delivered."""
        found = self._local.get_batch(refs, deliver)
        places = [place for place, hit in enumerate(found) if not hit]
        if self._remote is None or not places:
            return found
        rest = self._remote.get_batch(
            [refs[place] for place in places], lambda index, body: deliver(places[index], body)
        )
        return _filled_in(found, places, rest)

    def contains_batch(self, refs: Sequence[PageRef]) -> list[bool]:
        """Tell which pages are in one of them."""
        found = self._local.contains_batch(refs)
        places = [place for place, there in enumerate(found) if not there]
        if self._remote is None or not places:
            return found
        rest = self._remote.contains_batch([refs[place] for place in places])
        return _filled_in(found, places, rest)


def _filled_in(found: list[bool], places: Sequence[int], rest: Sequence[bool]) -> list[bool]:
    for place, hit in zip(places, rest, strict=True):
        found[place] = hit
    return found

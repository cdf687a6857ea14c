"""Who holds how much of the REMOTE tier, over all machines, as far as this one can tell.

A list of all names, taken now and then, is the truth; in between only what this machine did is
known. So the books are late by one list at most, and need no machine to tell another.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping

from sglang_ext.tiering.remote_names import HeldPage
from sglang_ext.types import Owner

__all__ = ["Holdings"]

_REMEMBERED = 2**18
"""Pages that this machine wrote and whose last use it knows."""
_OTHERS = 1024
"""Names of an owner's other pages that are remembered, to have something to remove."""


class Holdings:
    """The books. Not thread-safe: the store's lock guards them."""

    def __init__(self) -> None:
        self._used: Counter[Owner] = Counter()
        self._written: dict[Owner, OrderedDict[str, float]] = {}
        self._others: dict[Owner, dict[str, None]] = {}
        self._count = 0

    @property
    def used(self) -> Mapping[Owner, int]:
        """Bytes by owner."""
        return self._used

    @property
    def total(self) -> int:
        """Bytes of everybody. O(owners)."""
        return self._used.total()

    def settle(self, pages: Iterable[HeldPage], began: float) -> None:
        """Take over a list of all pages that was asked for at ``began``. O(pages)."""
        used: Counter[Owner] = Counter()
        others: dict[Owner, dict[str, None]] = {}
        seen: set[str] = set()
        for page in pages:
            used[page.owner] += page.bytes
            if page.name in self._written.get(page.owner, ()):
                seen.add(page.name)
            elif len(found := others.setdefault(page.owner, {})) < _OTHERS:
                found[page.name] = None
        self._forget_unseen(seen, began)
        self._used, self._others = used, others

    def add(self, page: HeldPage, now: float) -> None:
        """Note that this machine wrote a page."""
        written = self._written.setdefault(page.owner, OrderedDict())
        if page.name not in written:
            self._used[page.owner] += page.bytes
            self._count += 1
        written[page.name] = now
        written.move_to_end(page.name)
        if self._count > _REMEMBERED:
            longest = max(self._written.values(), key=len)
            longest.popitem(last=False)
            self._count -= 1

    def touch(self, owner: Owner, name: str, now: float) -> None:
        """Note that a page was read; means something for those that this machine wrote."""
        written = self._written.get(owner)
        if written is not None and name in written:
            written[name] = now
            written.move_to_end(name)

    def oldest(self, owner: Owner, count: int) -> list[str]:
        """Return names of pages to remove: of unknown use first, then the least recently used."""
        names = list(self._others.get(owner, ()))[:count]
        written = self._written.get(owner, OrderedDict())
        for name in written:
            if len(names) >= count:
                break
            names.append(name)
        return names

    def unused_since(self, owner: Owner, before: float) -> list[str]:
        """Return the pages that this machine wrote and nobody used here since. O(those)."""
        names = []
        for name, used in self._written.get(owner, {}).items():
            if used >= before:
                break
            names.append(name)
        return names

    def last_use(self, owner: Owner, name: str) -> float | None:
        """Return when a page that this machine wrote was used last."""
        written = self._written.get(owner)
        return None if written is None else written.get(name)

    def forget(self, page: HeldPage) -> None:
        """Note that a page is gone."""
        written = self._written.get(page.owner, OrderedDict[str, float]())
        known = written.pop(page.name, None) is not None
        self._count -= known
        if self._others.get(page.owner, {}).pop(page.name, 0) is None or known:
            self._used[page.owner] = max(0, self._used[page.owner] - page.bytes)
        self._tidy(page.owner)

    def forget_owner(self, owner: Owner) -> None:
        """Note that all pages of an owner are gone."""
        self._count -= len(self._written.pop(owner, ()))
        self._others.pop(owner, None)
        self._used.pop(owner, None)

    def check_integrity(self) -> None:
        """Assert what must always hold; for tests."""
        assert self._count == sum(map(len, self._written.values()))
        assert all(held > 0 for held in self._used.values()), self._used

    def _forget_unseen(self, seen: set[str], began: float) -> None:
        """Forget what the store dropped by itself; younger pages came after the list."""
        for written in self._written.values():
            gone = [name for name, used in written.items() if used < began and name not in seen]
            for name in gone:
                del written[name]
            self._count -= len(gone)

    def _tidy(self, owner: Owner) -> None:
        if not self._written.get(owner, True):
            del self._written[owner]
        if not self._used[owner]:
            del self._used[owner]

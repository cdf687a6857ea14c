"""Deleting owners from the shared store: now, or as soon as it answers, and for all machines."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from sglang_ext.tiering.counters import Counters
from sglang_ext.tiering.remote_holdings import Holdings
from sglang_ext.tiering.remote_keys import SharedKeys
from sglang_ext.tiering.remote_names import held_pages, key_name, pages_of
from sglang_ext.tiering.remote_notices import Notices
from sglang_ext.tiering.remote_objects import Objects
from sglang_ext.types import Owner

__all__ = ["Deletions"]


class Deletions:
    """What was deleted, and what still has to be. ``lock`` guards ``holdings``."""

    def __init__(
        self,
        objects: Objects,
        keys: SharedKeys | None,
        notices: Notices,
        holdings: Holdings,
        lock: threading.Lock,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._objects = objects
        self._keys = keys
        self._notices = notices
        self._holdings = holdings
        self._lock = lock
        self._counters = counters
        self._clock = clock
        self._begun: Counter[Owner] = Counter()
        """How often something of an owner was deleted: writes that began before are undone."""
        self._owed: set[Owner] = set()

    def is_owed(self, owner: Owner) -> bool:
        """Tell whether an owner is to be deleted first; until then nothing of it is used."""
        return owner in self._owed

    def begin(self, owners: Iterable[Owner]) -> None:
        """Note that something of these owners is being deleted."""
        with self._lock:
            self._begun.update(owners)

    def begun(self) -> Counter[Owner]:
        """Return what to compare with when a write that begins now ends. O(owners)."""
        with self._lock:
            return Counter(self._begun)

    def survives(self, owner: Owner, begun: Counter[Owner]) -> bool:
        """Tell whether nothing of the owner was deleted since ``begun``."""
        return self._begun[owner] == begun[owner]

    def owe(self, owners: Iterable[Owner]) -> None:
        """Delete these owners as soon as the store answers."""
        self._owed.update(owners)
        self._counters.add("deletion_owed")

    def settle(self) -> None:
        """Do what is owed. Raises StoreSilent."""
        for owner in list(self._owed):
            self.delete(owner)
            self._owed.discard(owner)

    def delete(self, owner: Owner) -> int:
        """Delete all of an owner, and tell other machines; how many pages. Raises StoreSilent."""
        removed = self._drop(owner)
        self._notices.tell(owner, self._clock())
        return removed

    def drop_other_form(
        self,
        names: Sequence[str],
        encrypted: Callable[[Owner], bool],
        ours: Callable[[Owner], bool],
    ) -> bool:
        """Delete what our owners have in clear that must be encrypted, and the other way round.

        Other engines have other owners, of whom we do not know how they want it. Tells whether
        anything was deleted. Raises StoreSilent. O(names).
        """
        there = set(names)
        holders = set() if self._keys is None else {page.owner for page in held_pages(names)}
        wrong = [
            owner
            for owner in holders
            if ours(owner) and encrypted(owner) != (key_name(owner) in there)
        ]
        for owner in wrong:
            self._drop(owner)
        return bool(wrong)

    def _drop(self, owner: Owner) -> int:
        if self._keys is not None:
            self._keys.destroy(owner)
        removed = self._objects.remove_matching(pages_of(owner))
        with self._lock:
            self._holdings.forget_owner(owner)
        return removed

"""Keeps what one machine knows of the shared store true, now and again, on a thread of its own.

    list of all names -> news of deletions, pages in the wrong form -> who holds how much

What could not be done while the store was silent is done first.
"""

import threading
import time
from collections.abc import Callable, Sequence

from sglang_ext.tiering.counters import Counters
from sglang_ext.tiering.remote_deletions import Deletions
from sglang_ext.tiering.remote_holdings import Holdings
from sglang_ext.tiering.remote_link import Link
from sglang_ext.tiering.remote_names import held_pages
from sglang_ext.tiering.remote_notices import Notices
from sglang_ext.tiering.remote_objects import Objects, StoreSilent
from sglang_ext.types import Owner

__all__ = ["Upkeep"]

_RETRY_S = 0.25
"""How often it is looked whether a pause is over."""
_AT_MOST = 50
"""A list of all names takes time from everything else: at most one part in so many."""


class Upkeep:
    """``lock`` guards ``holdings``; ``encrypted`` and ``copies`` are the policy's, of an owner."""

    def __init__(
        self,
        objects: Objects,
        link: Link,
        holdings: Holdings,
        lock: threading.Lock,
        deletions: Deletions,
        notices: Notices,
        counters: Counters,
        clock: Callable[[], float],
        encrypted: Callable[[Owner], bool],
        copies: Callable[[Owner], bool],
    ) -> None:
        self._objects = objects
        self._link = link
        self._holdings = holdings
        self._lock = lock
        self._deletions = deletions
        self._notices = notices
        self._counters = counters
        self._clock = clock
        self._encrypted = encrypted
        self._copies = copies
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None
        self.settled = False
        """Whether what lies there has the form that the policy wants."""

    def start(self, every_s: float, afterwards: Callable[[], None]) -> None:
        """Refresh every so many seconds, more rarely where it takes long, and do ``afterwards``.

        Sooner where the store was silent, until it answers. Once only.
        """
        if self._watcher is None:
            self._watcher = threading.Thread(
                target=self._watch,
                args=(every_s, afterwards),
                name="sglang-ext-remote",
                daemon=True,
            )
            self._watcher.start()

    def stop(self) -> None:
        """Ask nothing more."""
        self._closed.set()

    def refresh(self) -> None:
        """Ask who holds what, do what is owed, and go on where the store was silent.

        O(pages in the store).
        """
        if self._closed.is_set() or not self._link.breaker.allows():
            return
        began = self._clock()
        try:
            names = self._caught_up()
        except StoreSilent as error:
            self._counters.add("silent")
            self._link.breaker.failed(str(error))
            return
        self._link.breaker.worked()
        with self._lock:
            self._holdings.settle(held_pages(names), began)

    def _watch(self, every_s: float, afterwards: Callable[[], None]) -> None:
        due = time.monotonic() + every_s
        while not self._closed.wait(_RETRY_S):
            began = time.monotonic()
            if self._is_fine() and began < due:
                continue
            self.refresh()
            if self._is_fine():
                afterwards()
            now = time.monotonic()
            due = now + max(every_s, _AT_MOST * (now - began))

    def _is_fine(self) -> bool:
        return self._link.is_open and self.settled

    def _caught_up(self) -> Sequence[str]:
        """Do what is owed, and return the names of all objects. Raises StoreSilent."""
        self._deletions.settle()
        names = self._objects.names()
        self._notices.read(names, self._clock())
        if not self.settled:
            if self._deletions.drop_other_form(names, self._encrypted, self._copies):
                names = self._objects.names()
            self.settled = True
        return names

"""Tells other machines that all of an owner was deleted, by objects that each of them lists."""

import secrets
import threading
from collections import deque
from collections.abc import Iterable

from sglang_ext.tiering.remote_names import Notice, notice_name, notices
from sglang_ext.tiering.remote_objects import Objects
from sglang_ext.types import Owner

__all__ = ["Notices"]

_KEPT_S = 7 * 86400.0
"""A machine that was off for longer deletes nothing because of it."""


class Notices:
    """What this machine told, and what others told it. Methods raise StoreSilent."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._word = objects.buffer(1)
        self._known: set[str] = set()
        self._lock = threading.Lock()
        self.news: deque[Notice] = deque()
        """Notices of other machines that nobody here has acted on yet."""

    def tell(self, owner: Owner, time: float) -> None:
        """Tell all others."""
        name = notice_name(owner, time, secrets.token_hex(4))
        with self._lock:
            self._known.add(name)
        self._objects.put([name], [self._word])

    def read(self, names: Iterable[str], now: float) -> None:
        """Look for news in a list of all names, and remove notices that are old. O(names)."""
        found = list(notices(names))
        old = [notice.name for notice in found if notice.time < now - _KEPT_S]
        with self._lock:
            self.news.extend(notice for notice in found if notice.name not in self._known)
            self._known |= {notice.name for notice in found}
        if old:
            self._objects.remove(old)

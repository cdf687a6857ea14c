"""Keeps everybody from waiting for a store that does not answer."""

import logging
import threading
import time
from collections.abc import Callable

__all__ = ["Breaker"]

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0


class Breaker:
    """After a failure nobody asks for a while, twice as long after each further one. Thread-safe.

    When the while is over, one caller tries; the others go on once it got an answer.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._pause_s = 0.0
        self._until = 0.0
        self._trying = False

    @property
    def is_closed(self) -> bool:
        """Whether the last answer was good."""
        return self._pause_s == 0.0

    def allows(self) -> bool:
        """Tell whether to ask now; True while it is open only for the one who tries."""
        with self._lock:
            if self._pause_s == 0.0:
                return True
            now = self._clock()
            if now < self._until:
                return False
            self._until = now + self._pause_s
            self._trying = True
            return True

    def failed(self, why: str) -> None:
        """Note that the store did not answer, or was too slow."""
        with self._lock:
            if self._pause_s and not self._trying:
                return  # one of those who had asked before it was noticed
            if not self._pause_s:
                logger.warning("the remote store does not answer: %s; going on without it", why)
            self._trying = False
            self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
            self._until = self._clock() + self._pause_s

    def worked(self) -> None:
        """Note an answer."""
        with self._lock:
            if self._pause_s:
                logger.warning("the remote store answers again")
            self._pause_s = 0.0
            self._trying = False

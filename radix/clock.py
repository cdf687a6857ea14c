"""The clock of one cache: milliseconds that every rank agrees on, still between two ticks."""

import time
from collections.abc import Callable

__all__ = ["SharedClock", "monotonic_ms"]


def monotonic_ms() -> int:
    """Return this machine's monotonic time in milliseconds."""
    return time.monotonic_ns() // 1_000_000


class SharedClock:
    """Holds ``now_ms``, the same number on every rank, so that stamps and TTLs agree.

    ``agree`` turns this rank's time into the common one (all-reduce MAX; the identity on one
    rank). All ranks must call ``tick`` equally often.
    """

    def __init__(
        self,
        agree: Callable[[int], int] | None = None,
        read: Callable[[], int] = monotonic_ms,
    ) -> None:
        self._agree = agree
        self._read = read
        self.now_ms = 0
        self.tick()

    def tick(self) -> int:
        """Advance to the present and return it; never goes back. One all-reduce, none alone."""
        now = self._read()
        if self._agree is not None:
            now = self._agree(now)
        self.now_ms = max(self.now_ms, now)
        return self.now_ms

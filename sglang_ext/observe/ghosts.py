"""Which prompt pages were computed before, and when they were last used: a memory of fixed size
that only ever forgets.

A page is known by a hash of the namespace and of all tokens up to its end, as the cache knows it.
Its hash lies in the slot that its low bits name, over whatever lay there. So a count may be too
low, after about as many new pages as there are slots, and is too high only where two hashes of 64
bits are equal.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

__all__ = ["GhostPages", "Seen"]

_SLOTS = 1 << 20
_POSITION = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class Seen(NamedTuple):
    """What was known of a prompt, in whole pages and without its last token (no cache saves it)."""

    again: int
    """Tokens that are computed and had been computed before."""
    idle: "np.ndarray"
    """Whole seconds since its last use of each page that had been computed before."""


_NEW = Seen(0, np.zeros(0, np.int64))


class GhostPages:
    """Remembers about ``slots`` pages of all namespaces in ``12 * slots`` bytes."""

    def __init__(self, slots: int = _SLOTS, clock: Callable[[], float] = time.monotonic) -> None:
        """``slots`` is a power of two."""
        self._mask = np.uint64(slots - 1)
        self._slots = np.zeros(slots, np.uint64)
        self._used = np.zeros(slots, np.uint32)
        self._clock = clock
        self._start = clock()

    def computed(self, namespace: str, tokens: Sequence[int], cached: int, page_size: int) -> Seen:
        """Note that a prompt's pages of ``page_size`` are used, and computed from ``cached`` on.

        About 10 ns a token.
        """
        pages = (len(tokens) - 1) // page_size
        if pages <= 0:
            return _NEW
        ends = _page_hashes(namespace, tokens[: pages * page_size], page_size)
        places = ends & self._mask
        known = self._slots[places] == ends
        first, now = -(-cached // page_size), int(self._clock() - self._start)
        idle = now - self._used[places[known]].astype(np.int64)
        self._slots[places[first:]] = ends[first:]
        # A cached page that nobody here computed (public text, a page forgotten) stays unknown.
        self._used[places[known]] = self._used[places[first:]] = now
        return Seen(int(np.count_nonzero(known[first:])) * page_size, idle)


def _page_hashes(namespace: str, tokens: Sequence[int], size: int) -> "np.ndarray":
    """Return a hash of the text up to each page's end: a sum of each token mixed with its place.

    The mixing is that of splitmix64.
    """
    seed = np.uint64(xxh3_64_intdigest(namespace.encode()))
    values = np.array(tokens, np.int64).view(np.uint64)
    places = np.arange(1, len(values) + 1, dtype=np.uint64)
    sums = np.cumsum(_mix(_mix(values + seed) + places * _POSITION), dtype=np.uint64)
    return _mix(sums[size - 1 :: size])


def _mix(values: "np.ndarray") -> "np.ndarray":
    values = (values ^ (values >> np.uint64(30))) * _MIX[0]
    values = (values ^ (values >> np.uint64(27))) * _MIX[1]
    return values ^ (values >> np.uint64(31))

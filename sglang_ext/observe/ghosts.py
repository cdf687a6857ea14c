"""Which prompt pages were computed before: a memory of fixed size that only ever forgets.

A page is known by a hash of the namespace and of all tokens up to its end, as the cache knows it.
The memory is one array: a page's hash lies in the slot that its low bits name, over whatever lay
there. So a count may be too low, after about as many new pages as there are slots, and is too high
only where two hashes of 64 bits are equal.
"""

from collections.abc import Sequence

import numpy as np
from xxhash import xxh3_64_intdigest

__all__ = ["GhostPages"]

_SLOTS = 1 << 20
_POSITION = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class GhostPages:
    """Remembers about ``slots`` pages of all namespaces in ``8 * slots`` bytes."""

    def __init__(self, slots: int = _SLOTS) -> None:
        """``slots`` is a power of two."""
        self._mask = np.uint64(slots - 1)
        self._slots = np.zeros(slots, np.uint64)

    def computed(self, namespace: str, tokens: Sequence[int], cached: int, page_size: int) -> int:
        """Note that a prompt's pages of ``page_size`` from token ``cached`` on are computed.

        Returns how many of those tokens, in whole pages and without the last token of the prompt
        (which no cache saves), had been computed before. About 10 ns a token.
        """
        pages = (len(tokens) - 1) // page_size
        first = -(-cached // page_size)
        if pages <= first:
            return 0
        ends = _page_hashes(namespace, tokens[: pages * page_size], page_size)[first:]
        places = ends & self._mask
        again = int(np.count_nonzero(self._slots[places] == ends))
        self._slots[places] = ends
        return again * page_size


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

"""Where the text of a request stops being public.

A public prefix is a run of token ids that the policy registers (a system prompt after the chat
template). A request shares every page of it that it repeats from its first token on, and nothing
behind it.
"""

from array import array
from collections.abc import Iterable, Sequence

__all__ = ["PublicPrefixes", "common_length"]

_WINDOW = 256
_GROWTH = 8


class PublicPrefixes:
    """The registered public prefixes of one cache, fixed for its life.

    ``sequences`` are token ids; those shorter than one page of ``page_size`` tokens can never be
    shared and are left out. Reading it never changes it.
    """

    def __init__(self, sequences: Iterable[Sequence[int]], page_size: int) -> None:
        self.page_size = page_size
        self._by_head: dict[tuple[int, ...], list[array[int]]] = {}
        for sequence in sequences:
            if len(sequence) >= page_size:
                tokens = array("q", sequence)
                self._by_head.setdefault(tuple(tokens[:page_size]), []).append(tokens)

    def __bool__(self) -> bool:
        return bool(self._by_head)

    @property
    def tokens(self) -> int:
        """The most tokens that public pages can take, in whole pages."""
        page = self.page_size
        runs = (tokens for alike in self._by_head.values() for tokens in alike)
        return sum(len(tokens) // page * page for tokens in runs)

    def boundary(self, token_ids: "array[int]", bigram: bool = False) -> int:
        """Return how many leading units of ``token_ids`` are public, in whole pages.

        A unit is a token, or with ``bigram`` (EAGLE) a pair of neighbours: a pair is public only
        when both of its tokens are. Cost: one dictionary lookup unless a prefix begins alike.
        """
        alike = self._by_head.get(tuple(token_ids[: self.page_size]))
        if alike is None:
            return 0
        shared = max(common_length(token_ids, tokens) for tokens in alike)
        units = shared - 1 if bigram else shared
        return units // self.page_size * self.page_size


def common_length(
    left: "array[int]", right: "array[int]", most: int | None = None, offset: int = 0
) -> int:
    """Return how far ``left`` agrees with ``right`` from ``offset`` on, ``most`` at the most.

    Compares slices in C, in windows that grow, and halves the window that differs: O(result).
    """
    if most is None:
        most = min(len(left), len(right) - offset)
    low, width = 0, _WINDOW
    while low < most:
        high = min(low + width, most)
        if left[low:high] != right[offset + low : offset + high]:
            return _first_difference(left, right, low, high, offset)
        low, width = high, width * _GROWTH
    return low


def _first_difference(
    left: "array[int]", right: "array[int]", low: int, high: int, offset: int
) -> int:
    """Return where in [low, high), which differs, ``left`` first differs."""
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[offset + low : offset + middle]:
            low = middle
        else:
            high = middle
    return low

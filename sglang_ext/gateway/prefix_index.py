"""Which engine was sent which text before, for each owner apart.

A text is a chain of blocks: each name stands for its block and all before it (see ``prompt``). What
an engine has dropped since is not known here. A wrong entry makes a request wait for a busier
engine than it had to, or compute what another one has; never more than that.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from sglang_ext.types import Owner

__all__ = ["PrefixIndex"]

_MOST_BLOCKS = 2**16
"""With a kilobyte each, the text of some 16 million tokens, in about 10 MB."""


class PrefixIndex:
    """Blocks by owner and engine, the least recently used first to go. Holds no text."""

    def __init__(self, most_blocks: int = _MOST_BLOCKS) -> None:
        self._most = most_blocks
        self._counts: Counter[str] = Counter()
        self._held: dict[tuple[Owner, str], OrderedDict[bytes, None]] = {}

    def __len__(self) -> int:
        """Return how many blocks it holds, those of each engine counted."""
        return self._counts.total()

    def held(self, engine: str) -> int:
        """Return how many blocks an engine has."""
        return self._counts[engine]

    def matched(
        self, owner: Owner, chain: Sequence[bytes], engines: Iterable[str]
    ) -> dict[str, int]:
        """Return how many blocks from the start of ``chain`` each engine has; O(what they have).

        Engines that have none are left out.
        """
        found = {}
        for engine in engines:
            held = self._held.get((owner, engine))
            count = _first_missing(held, chain) if held else 0
            if count:
                found[engine] = count
        return found

    def learn(self, owner: Owner, chain: Sequence[bytes], engine: str) -> None:
        """Note that an engine gets a text of ``owner``. O(chain), O(owners) when it is full."""
        if not chain:
            return
        held = self._held.setdefault((owner, engine), OrderedDict())
        before = len(held)
        # The start last: what goes first is the end of a text, without which its start is of use.
        for block in reversed(chain[: self._most]):
            held[block] = None
            held.move_to_end(block)
        self._counts[engine] += len(held) - before
        while len(self) > self._most:
            self._shrink(len(self) - self._most)

    def forget_engine(self, engine: str) -> None:
        """Drop what is known of an engine: it started again."""
        self._drop([key for key in self._held if key[1] == engine])

    def forget_owner(self, owner: Owner) -> None:
        """Drop what is known of an owner: it was flushed, or is gone."""
        self._drop([key for key in self._held if key[0] == owner])

    def clear(self) -> None:
        """Drop everything."""
        self._drop(list(self._held))

    def _shrink(self, excess: int) -> None:
        """Take what is too much from who has most, so that nobody's flood drops another's."""
        key = max(self._held, key=lambda key: len(self._held[key]))
        held = self._held[key]
        taken = min(excess, len(held))
        for _ in range(taken):
            held.popitem(last=False)
        self._counts[key[1]] -= taken
        if not held:
            del self._held[key]

    def _drop(self, keys: Iterable[tuple[Owner, str]]) -> None:
        for key in keys:
            self._counts[key[1]] -= len(self._held.pop(key))


def _first_missing(held: OrderedDict[bytes, None], chain: Sequence[bytes]) -> int:
    for place, block in enumerate(chain):
        if block not in held:
            return place
    return len(chain)

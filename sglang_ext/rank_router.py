"""Which data-parallel rank computes a request, so that conversations stay and memory fills evenly.

SGLang's own order gives a conversation's turns to one rank after the other: each computes all of
it, and holds it once more. Here a conversation has a home, and any other request goes where the
least is in the way, counted in tokens: what the rank holds, what it would have to compute, and some
for each request that it works on. A full rank holds what it can; then only the last two count.
"""

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from sglang_ext.gateway.prefix_index import PrefixIndex
from sglang_ext.types import Owner

__all__ = ["RankRouter"]

_BLOCK_TOKENS = 32
_NAME_BYTES = 16
_REQUEST_TOKENS = 256
"""What a request that runs counts for: the answer that it may still grow by."""
_MOST_HOMES = 2**16


class RankRouter:
    """Chooses ranks; one for all tenants. ``capacity``: tokens that all ranks can hold together.

    Nothing of one owner is compared with another's. What a rank has dropped since is not known: the
    least recently sent is taken for gone once there is more than fits.
    """

    def __init__(self, capacity: int) -> None:
        self._index = PrefixIndex(max(1, capacity // _BLOCK_TOKENS))
        self._homes: OrderedDict[tuple[Owner, str], int] = OrderedDict()

    def choose(
        self,
        owner: Owner,
        session: str,
        division: str,
        tokens: Sequence[int],
        in_flight: Mapping[int, int],
    ) -> int:
        """Return the rank for a prompt, one of those in ``in_flight``, and remember it. O(tokens).

        ``session``: the name of its conversation, empty for none; ``division``: what keeps equal
        text of one owner apart.
        """
        chain = _chain(division, tokens)
        rank = self._homes.get((owner, session)) if session else None
        if rank is None or rank not in in_flight:
            rank = self._least(owner, chain, in_flight)
        if session:
            self._settle((owner, session), rank)
        self._index.learn(owner, chain, str(rank))
        return rank

    def _least(self, owner: Owner, chain: Sequence[bytes], in_flight: Mapping[int, int]) -> int:
        warm = self._index.matched(owner, chain, map(str, in_flight))

        def in_the_way(rank: int) -> int:
            blocks = self._index.held(str(rank)) + len(chain) - warm.get(str(rank), 0)
            return blocks * _BLOCK_TOKENS + in_flight[rank] * _REQUEST_TOKENS

        return min(in_flight, key=in_the_way)

    def _settle(self, key: tuple[Owner, str], rank: int) -> None:
        self._homes[key] = rank
        self._homes.move_to_end(key)
        if len(self._homes) > _MOST_HOMES:
            self._homes.popitem(last=False)


def _chain(division: str, tokens: Sequence[int]) -> list[bytes]:
    """Return the names of the whole blocks of a prompt, each for all before it as well."""
    names = []
    chained = blake2b(division.encode("utf-8", "surrogatepass"), digest_size=_NAME_BYTES)
    chained.update(b"\0")
    for start in range(0, len(tokens) - _BLOCK_TOKENS + 1, _BLOCK_TOKENS):
        chained.update(array("q", tokens[start : start + _BLOCK_TOKENS]).tobytes())
        names.append(chained.digest())
    return names

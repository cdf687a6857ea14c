"""What each tenant had computed before: the measure of what a cache lost.

A prompt token is *known* when this tenant has had it computed, with everything before it, in a
prompt or an answer that came before. It is *recomputed* when it is known and does not come from the
cache. The last token of a prompt is never known, since every engine has to run it, and neither is
the last one of an answer, whose KV no engine computes.
"""

from collections.abc import Iterator, Sequence

__all__ = ["KnownText"]


class KnownText:
    """The texts of one tenant, by the hash of each of their beginnings. O(tokens) a call."""

    def __init__(self) -> None:
        self._beginnings: set[int] = set()

    def add(self, tokens: Sequence[int]) -> None:
        """Take note that every beginning of ``tokens`` is computed."""
        self._beginnings.update(_hashes(tokens))

    def known(self, prompt: Sequence[int]) -> int:
        """Return how many tokens of ``prompt`` are known; at most all but one."""
        count = 0
        for beginning in _hashes(prompt[:-1]):
            if beginning not in self._beginnings:
                break
            count += 1
        return count


def _hashes(tokens: Sequence[int]) -> Iterator[int]:
    beginning = 0
    for token in tokens:
        beginning = hash((beginning, token))
        yield beginning

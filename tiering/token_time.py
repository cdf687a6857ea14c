"""Token-seconds by owner and tier: how much was held for how long, which is what a bill is made of.

    tokens │     ┌────┐
           │ ┌───┘    └──┐        the area below the line, exact on the clock of the cache
           └─┴───────────┴── time

The clock stands still between two ticks, so it is enough to look once a tick at what changed.
"""

from collections.abc import Callable, Iterable, Iterator

from sglang_ext.types import Owner, Tier

__all__ = ["Held", "TokenTime"]

Held = tuple[Owner, Tier]
"""Whose tokens, and where."""


class _Row:
    """Tokens held since a time, and token-milliseconds until then."""

    __slots__ = ("area", "since", "tokens")

    def __init__(self, now_ms: int) -> None:
        self.area = 0
        self.tokens = 0
        self.since = now_ms

    def until(self, now_ms: int) -> int:
        return self.area + self.tokens * (now_ms - self.since)


class TokenTime:
    """The areas, in token-milliseconds, and whole numbers of any size: nothing is ever rounded."""

    def __init__(self) -> None:
        self._rows: dict[Held, _Row] = {}

    def settle(self, changed: Iterable[Held], tokens: Callable[[Held], int], now_ms: int) -> None:
        """Take in that what these hold changed at ``now_ms``. O(changed)."""
        for held in changed:
            row = self._rows.get(held)
            if row is None:
                row = self._rows[held] = _Row(now_ms)
            row.area, row.since, row.tokens = row.until(now_ms), now_ms, tokens(held)

    def totals(self, now_ms: int) -> Iterator[tuple[Held, float]]:
        """Yield the token-seconds of everybody who ever held something. O(owners)."""
        for held, row in self._rows.items():
            yield held, row.until(now_ms) / 1000

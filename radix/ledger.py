"""How many tokens each owner holds in each tier, counted as they change and never by a walk."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sglang_ext.types import Owner, Tier

__all__ = ["Ledger", "Usage"]


@dataclass(slots=True)
class Usage:
    """Tokens of one owner in one tier.

    ``evictable`` may be taken, ``protected`` lies under a lock or pin, and ``running`` is held by
    requests that have not handed it to the tree yet (``kv_allocated_len - cache_protected_len``).
    """

    evictable: int = 0
    protected: int = 0
    running: int = 0

    @property
    def tokens(self) -> int:
        """Everything that the owner holds in the tier."""
        return self.evictable + self.protected + self.running


class Ledger:
    """Usage by (owner, tier). Each change costs O(1); owners that hold nothing are forgotten.

    ``changed`` collects whose usage changed, for one reader, who empties it.
    """

    def __init__(self, bytes_per_token: int = 0) -> None:
        self.bytes_per_token = bytes_per_token
        self.changed: set[tuple[Owner, Tier]] = set()
        self._rows: dict[tuple[Owner, Tier], Usage] = {}
        self._watched: dict[Tier, set[Owner]] = {}

    def watch(self, tier: Tier) -> set[Owner]:
        """Return the set that collects the owners whose usage of ``tier`` changes from now on.

        Who holds something already is in it. A tier has one watcher, the last one, who empties it.
        """
        self._watched[tier] = {owner for owner, held, _ in self if held is tier}
        return self._watched[tier]

    def book(self, owner: Owner, tier: Tier, evictable: int, protected: int) -> None:
        """Add these many tokens, negative when they left, to what the tree holds for ``owner``."""
        held = (owner, tier)
        row = self._rows.get(held)
        if row is None:
            row = self._rows[held] = Usage()
        row.evictable += evictable
        row.protected += protected
        if not (row.evictable or row.protected or row.running):
            del self._rows[held]
        self.changed.add(held)
        watched = self._watched.get(tier)
        if watched is not None:
            watched.add(owner)

    def set_running(self, tokens: Mapping[Owner, int]) -> None:
        """Replace what running requests hold in HBM. O(owners that run or ran)."""
        stopped = [owner for owner, _, usage in self if usage.running and owner not in tokens]
        for owner, held in [*tokens.items(), *((owner, 0) for owner in stopped)]:
            self._rows.setdefault((owner, Tier.HBM), Usage()).running = held
            self.book(owner, Tier.HBM, 0, 0)

    def start_running(self, owner: Owner, tokens: int) -> None:
        """Add what was allocated for a request of ``owner`` since ``set_running``. O(1)."""
        self._rows.setdefault((owner, Tier.HBM), Usage()).running += tokens
        self.book(owner, Tier.HBM, 0, 0)

    def stop_running(self, owner: Owner, tokens: int) -> None:
        """Take back what a request of ``owner`` gave to the tree, or freed. O(1)."""
        row = self._rows.get((owner, Tier.HBM))
        if row is not None:
            # A token that was decoded since the last ``set_running`` was never counted.
            row.running = max(0, row.running - tokens)
            self.book(owner, Tier.HBM, 0, 0)

    def usage(self, owner: Owner, tier: Tier) -> Usage:
        """Return what ``owner`` holds in ``tier``; a copy."""
        row = self._rows.get((owner, tier), Usage())
        return Usage(row.evictable, row.protected, row.running)

    def tokens(self, held: tuple[Owner, Tier]) -> int:
        """Return how many tokens an owner holds in a tier. O(1)."""
        row = self._rows.get(held)
        return 0 if row is None else row.tokens

    def bytes(self, owner: Owner, tier: Tier) -> int:
        """Return the bytes that ``owner`` holds in ``tier``."""
        return self.usage(owner, tier).tokens * self.bytes_per_token

    def __iter__(self) -> Iterator[tuple[Owner, Tier, Usage]]:
        for (owner, tier), usage in self._rows.items():
            yield owner, tier, usage

    def clear(self) -> None:
        """Forget what the tree held; running requests keep theirs."""
        running = {owner: usage.running for owner, _, usage in self if usage.running}
        for owner, tier, _ in self:
            if tier in self._watched:
                self._watched[tier].add(owner)
        self.changed.update(self._rows)
        self._rows.clear()
        self.set_running(running)

"""How many bytes of a store each owner may hold, and who gives first when it is full."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sglang_ext.types import Owner

__all__ = ["Caps", "Limit", "VictimOrder", "furthest_above_share"]


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What one owner may hold, in bytes on disk.

    ``quota_bytes`` None means an equal share of the total. A soft quota may be exceeded while there
    is room; a ``hard`` one never. ``reserve_bytes`` are never taken for another owner.
    """

    quota_bytes: int | None = None
    hard: bool = False
    reserve_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Caps:
    """The whole store's hard cap in bytes, and the limits of its owners."""

    total_bytes: int
    limits: Mapping[Owner, Limit] = field(default_factory=dict)
    default: Limit = Limit()

    def limit(self, owner: Owner) -> Limit:
        """Return the limit of ``owner``, the default one if it has none of its own."""
        return self.limits.get(owner, self.default)

    def ceiling(self, owner: Owner) -> int:
        """Return the bytes that ``owner`` can never exceed."""
        limit = self.limit(owner)
        if not limit.hard or limit.quota_bytes is None:
            return self.total_bytes
        return min(limit.quota_bytes, self.total_bytes)

    def share(self, owner: Owner, owners: int) -> int:
        """Return the bytes that ``owner`` may hold when ``owners`` compete for a full store."""
        quota = self.limit(owner).quota_bytes
        return self.total_bytes // max(owners, 1) if quota is None else quota


VictimOrder = Callable[[Mapping[Owner, int], Caps, Owner], Sequence[Owner]]
"""(bytes held by owner, caps, who needs room) -> who gives first; an owner left out never gives."""


def furthest_above_share(usage: Mapping[Owner, int], caps: Caps, asking: Owner) -> Sequence[Owner]:
    """Order owners by how far they are above their share; reserves are kept for their owners.

    Costs O(owners * log owners).
    """
    above = {
        owner: held - caps.share(owner, len(usage))
        for owner, held in usage.items()
        if held > 0 and (owner == asking or held > caps.limit(owner).reserve_bytes)
    }
    return sorted(above, key=lambda owner: (-above[owner], owner))

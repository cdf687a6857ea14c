"""What one rank puts into the shared store, and how long anybody waits for it."""

from collections.abc import Callable
from dataclasses import dataclass

from sglang_ext.tiering.caps import Caps, VictimOrder, furthest_above_share
from sglang_ext.tiering.page_format import HEADER_BYTES, Fingerprint
from sglang_ext.types import Owner

__all__ = ["RemoteConfig"]


@dataclass(frozen=True, kw_only=True)
class RemoteConfig:
    """What one rank puts into the shared store.

    ``page_bytes`` is the largest body; every page counts as much. ``caps`` bound the whole store,
    all machines and ranks together. ``copies`` tells whose pages go there, ``lifetime_s`` for how
    long after it was written a page is good. Nobody waits longer than ``timeout_s``.
    """

    fingerprint: Fingerprint
    page_bytes: int
    caps: Caps
    depth: int = 4
    timeout_s: float = 2.0
    refresh_s: float = 10.0
    encrypted: Callable[[Owner], bool] = lambda owner: False
    copies: Callable[[Owner], bool] = lambda owner: True
    lifetime_s: Callable[[Owner], float] = lambda owner: float("inf")
    order: VictimOrder = furthest_above_share

    @property
    def slot_bytes(self) -> int:
        """What each page counts for, its header included."""
        return HEADER_BYTES + self.page_bytes

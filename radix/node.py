"""A node of the extended tree: SGLang's, plus who owns it and what the ledger knows of it."""

from typing import Any, NamedTuple

from sglang.srt.mem_cache.unified_cache.component_type import BASE_COMPONENT_TYPE, ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

from sglang_ext.types import Owner, Tier

__all__ = ["NOTHING", "Holding", "TenantTreeNode"]


class Holding(NamedTuple):
    """Tokens of a node by tier; the flags say whether a lock keeps them there."""

    hbm: int
    hbm_locked: bool
    cpu: int
    cpu_locked: bool


NOTHING = Holding(0, False, 0, False)


class TenantTreeNode(UnifiedTreeNode):
    """A run of pages of one owner.

    ``access_ms`` is the last use on the shared clock, ``hits`` counts the requests after the first
    whose text ran through here, ``pins`` the pins anchored here, and ``booked`` what the ledger
    holds for it. Owner and tiers held are derived, so they cannot be wrong.
    """

    key: Any

    __slots__ = ("access_ms", "booked", "hits", "pins")

    def __init__(
        self, tree_components: tuple[ComponentType, ...], priority: int, now_ms: int
    ) -> None:
        super().__init__(tree_components, priority)
        self.access_ms = now_ms
        self.hits = 0
        self.pins = 0
        self.booked = NOTHING

    @property
    def owner(self) -> Owner:
        """Who owns the pages; not to be asked of the root, which has none."""
        return self.key.owner

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers that hold a copy of these pages and that the tree knows of."""
        full = self.component_data[BASE_COMPONENT_TYPE]
        held = ((Tier.HBM, full.value), (Tier.CPU, full.host_value))
        return tuple(tier for tier, value in held if value is not None)

    def holding(self) -> Holding:
        """Return what the node holds now. O(1)."""
        full = self.component_data[BASE_COMPONENT_TYPE]
        tokens = len(self.key)
        return Holding(
            0 if full.value is None else tokens,
            full.value is not None and full.lock_ref > 0,
            0 if full.host_value is None else tokens,
            full.host_value is not None and full.host_lock_ref > 0,
        )

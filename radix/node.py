"""A node of the extended tree: SGLang's, plus who owns it and what the ledger knows of it."""

from typing import Any

from sglang.srt.mem_cache.unified_cache.component_type import BASE_COMPONENT_TYPE, ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

from sglang_ext.types import Owner, Tier

__all__ = ["NOTHING", "Holding", "TenantTreeNode"]


Holding = tuple[int, bool, int, bool]
"""Tokens in HBM, whether locked there, tokens in CPU, whether locked there."""

NOTHING: Holding = (0, False, 0, False)


class TenantTreeNode(UnifiedTreeNode):
    """A run of pages of one owner.

    ``access_ms`` is the last use on the shared clock, ``hits`` counts the requests after the first
    whose text ran through here, ``pins`` the pins anchored here, ``booked`` is what the ledger
    holds for it, and ``device_children`` counts the children that are on the device. Owner and
    tiers held are derived, so they cannot be wrong.
    """

    key: Any

    __slots__ = ("access_ms", "booked", "device_children", "hits", "pins")

    def __init__(
        self, tree_components: tuple[ComponentType, ...], priority: int, now_ms: int
    ) -> None:
        super().__init__(tree_components, priority)
        self.access_ms = now_ms
        self.hits = 0
        self.pins = 0
        self.booked = NOTHING
        self.device_children = 0

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
        on_device, on_host = full.value is not None, full.host_value is not None
        return (
            tokens if on_device else 0,
            on_device and full.lock_ref > 0,
            tokens if on_host else 0,
            on_host and full.host_lock_ref > 0,
        )

"""A node of the extended tree: SGLang's, plus who owns it and what the ledger knows of it."""

from typing import Any

from sglang.srt.mem_cache.unified_cache.component_type import BASE_COMPONENT_TYPE, ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

from sglang_ext.types import Owner, Tier

__all__ = ["FULL", "NOTHING", "Holding", "TenantTreeNode"]


FULL = int(BASE_COMPONENT_TYPE)
"""Full attention's place in a node's ``component_data``; a plain int, which lists index faster."""

Holding = tuple[int, bool, int, bool]
"""Tokens in HBM, whether locked there, tokens in CPU, whether locked there."""

NOTHING: Holding = (0, False, 0, False)


class TenantTreeNode(UnifiedTreeNode):
    """A run of pages of one owner.

    ``access_ms`` is the last use on the shared clock, ``hits`` counts the requests after the first
    whose text ran through here, ``pins`` the pins anchored here, ``booked`` is what the ledger
    holds for it, ``device_children`` and ``host_children`` count the children in HBM and those with
    a copy in host memory, ``sessions`` are those anchored here and ``lifespan`` is set where the
    pages have an end of their own. Owner and tiers held are derived, so they cannot be wrong.
    """

    key: Any

    # Slots, not defaults of the class: a field first set after the node is made would cost it the
    # dictionary layout that all nodes share, 1.3 KB.
    __slots__ = (
        "access_ms",
        "booked",
        "device_children",
        "hits",
        "host_children",
        "lifespan",
        "pins",
        "sessions",
    )

    def __init__(
        self, tree_components: tuple[ComponentType, ...], priority: int, now_ms: int
    ) -> None:
        UnifiedTreeNode.__init__(self, tree_components, priority)
        self.access_ms = now_ms
        self.booked = NOTHING
        self.hits = self.pins = self.device_children = self.host_children = 0
        self.sessions: dict[Any, None] | None = None
        self.lifespan: Any = None

    @property
    def owner(self) -> Owner:
        """Who owns the pages; not to be asked of the root, which has none."""
        return self.key.owner

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers that hold a copy of these pages and that the tree knows of."""
        full = self.component_data[FULL]
        held = ((Tier.HBM, full.value), (Tier.CPU, full.host_value))
        return tuple(tier for tier, value in held if value is not None)

    def holding(self) -> Holding:
        """Return what the node holds now. O(1)."""
        full, tokens = self.component_data[FULL], self.key.size
        on_device = full.value is not None
        hbm, hbm_locked = tokens if on_device else 0, on_device and full.lock_ref > 0
        if full.host_value is None:
            return hbm, hbm_locked, 0, False
        return hbm, hbm_locked, tokens, full.host_lock_ref > 0

"""A node of the extended tree: SGLang's, plus who owns it and what the ledger knows of it."""

from operator import attrgetter
from typing import Any

from sglang.srt.mem_cache.unified_cache.component_type import BASE_COMPONENT_TYPE
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

from sglang_ext.types import Tier

__all__ = ["NOTHING", "Holding", "TenantTreeNode"]


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

    # Defaults of the class: most nodes never change them, and none of them costs time to make.
    access_ms: int = 0
    hits: int = 0
    pins: int = 0
    booked: Holding = NOTHING
    device_children: int = 0
    host_children: int = 0
    sessions: dict[Any, None] | None = None
    lifespan: Any = None
    sessions: dict[Any, None] | None = None
    lifespan: Any = None

    owner = property(attrgetter("key.owner"), doc="Who owns the pages; the root has no owner.")

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

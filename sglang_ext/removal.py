"""Frees given nodes of a cache's tree, and says what left each tier and what could not."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from sglang_ext.radix.order import Reason
from sglang_ext.types import Tier

__all__ = ["Flushed", "below", "free_nodes", "is_there"]


class Flushed(NamedTuple):
    """Tokens of one rank that left a tier and that are in use there, and bytes freed below.

    ``remote_bytes`` is None where there is no remote tier, or it was not asked.
    """

    freed: Mapping[Tier, int]
    in_use: Mapping[Tier, int]
    disk_bytes: int = 0
    remote_bytes: int | None = None

    @property
    def below(self) -> dict[str, int]:
        """Bytes freed below memory, as answers name them."""
        remote = {} if self.remote_bytes is None else {"remote_bytes": self.remote_bytes}
        return {"nvme_bytes": self.disk_bytes, **remote}


def free_nodes(
    cache: Any, nodes: Sequence[Any], tiers: Iterable[Tier], reason: Reason, *, copied: bool = False
) -> Flushed:
    """Free what ``nodes``, children before parents, hold in ``tiers`` (HBM before CPU).

    ``copied``: in HBM only what has its copy in CPU; where it is missing, one is begun. What is
    locked, or has something below that stays, stays too, and is counted as in use. O(nodes).
    """
    freed: Counter[Tier] = Counter()
    tiers = tuple(tiers)
    for node in nodes:
        for tier in tiers:
            if node not in cache.tree_core.victims.leaves(tier):
                continue
            if copied and tier is Tier.HBM and not cache.copy_down(node):
                continue
            freed[tier] += len(node.key)
            cache.free_leaf(node, tier, reason)
    left: Counter[Tier] = Counter()
    for node in nodes:
        if is_there(cache, node):
            left.update({tier: len(node.key) for tier in node.tiers if tier in tiers})
    return Flushed({tier: freed[tier] for tier in tiers}, {tier: left[tier] for tier in tiers})


def is_there(cache: Any, node: Any) -> bool:
    """Tell whether a node is still in the tree; one that left it may keep what it held. O(1)."""
    return node.id in cache.tree_core._node_arena


def below(top: Any) -> list[Any]:
    """Return a node and all below it, children before parents. O(those)."""
    nodes = [top]
    for node in nodes:
        nodes.extend(node.children.values())
    return nodes[::-1]

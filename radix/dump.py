"""One picture of the tree for people: each run of pages, its owner and where its copies lie."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

from sglang.srt.mem_cache.unified_cache.component_type import BASE_COMPONENT_TYPE

from sglang_ext.radix.node import TenantTreeNode
from sglang_ext.types import Owner, Tier

__all__ = ["LowerTier", "dump"]


class LowerTier(Protocol):
    """A tier below memory: it names pages by hash, and its pages may outlive their run here."""

    def holds(self, owner: Owner, hashes: Sequence[str]) -> list[bool]:
        """Tell which pages of ``owner`` are there, without reading one."""

    def held_bytes(self) -> Mapping[Owner, int]:
        """Return the bytes that each owner holds there."""


def dump(
    tree: Any, page: int = 0, limit: int = 1000, lower: Mapping[Tier, LowerTier] | None = None
) -> dict[str, Any]:
    """Return page ``page`` of the runs of ``tree`` (a cache or its core), ready for JSON.

    Parents come before children. A run says its ``level`` in the tree, where its text ``start``s
    and how many ``tokens`` it has, its ``owner`` (empty: public), the ``tiers`` that hold it, its
    ``age_ms`` since the last use, and its ``hits``, ``locks`` and ``pins``. ``lower`` tiers are
    asked for the pages of the runs shown: ``stored`` says how many tokens of a run each of them
    has. What they hold in all, runs that left memory included, stands in ``lower`` by owner. The
    text itself is never shown. Changes nothing; costs O(page x limit) nodes and O(pages shown).
    """
    lower = lower or {}
    core = getattr(tree, "tree_core", tree)
    first = page * limit
    shown = islice(_placed(core), first, first + limit)
    total = len(core._node_arena) - 1
    return {
        "page": page,
        "pages": -(-total // limit),
        "runs_total": total,
        "runs": [_run(core, lower, *placed) for placed in shown],
        "lower": [
            {"tier": tier.value, "owner": owner, "bytes": held}
            for tier, store in lower.items()
            for owner, held in sorted(store.held_bytes().items())
        ],
    }


def _placed(core: Any) -> Iterator[tuple[TenantTreeNode, int, int]]:
    """Yield (node, level, first token) of every node but the root, depth first."""
    stack = [(node, 0, 0) for node in reversed(core.root_node.children.values())]
    while stack:
        node, level, start = stack.pop()
        yield node, level, start
        end = start + len(node.key)
        stack += [(child, level + 1, end) for child in reversed(node.children.values())]


def _run(
    core: Any, lower: Mapping[Tier, LowerTier], node: TenantTreeNode, level: int, start: int
) -> dict[str, Any]:
    stored = _stored(core, lower, node)
    return {
        "id": int(node.id),
        "level": level,
        "start": start,
        "tokens": len(node.key),
        "owner": node.owner,
        "tiers": [tier.value for tier in node.tiers] + list(stored),
        "stored": stored,
        "age_ms": core.clock.now_ms - node.access_ms,
        "hits": node.hits,
        "locks": node.component_data[BASE_COMPONENT_TYPE].lock_ref,
        "pins": node.pins,
    }


def _stored(core: Any, lower: Mapping[Tier, LowerTier], node: TenantTreeNode) -> dict[str, int]:
    """Return how many tokens of a run each lower tier holds, those that hold some."""
    hashes = node.hash_value or ()
    found = {tier: sum(store.holds(node.owner, hashes)) for tier, store in lower.items()}
    return {tier.value: pages * core.page_size for tier, pages in found.items() if pages}

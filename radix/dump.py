"""One picture of the tree for people: each run of pages, its owner and where its copies lie."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from sglang.srt.mem_cache.unified_cache.component_type import BASE_COMPONENT_TYPE

from sglang_ext.radix.node import TenantTreeNode

__all__ = ["dump"]


def dump(tree: Any, page: int = 0, limit: int = 1000) -> dict[str, Any]:
    """Return page ``page`` of the runs of ``tree`` (a cache or its core), ready for JSON.

    Parents come before children. A run says its ``level`` in the tree, where its text ``start``s
    and how many ``tokens`` it has, its ``owner`` (empty: public), the ``tiers`` that hold it, its
    ``age_ms`` since the last use, and its ``hits``, ``locks`` and ``pins``. The text itself is
    never shown. Changes nothing; costs O(page x limit) nodes.
    """
    core = getattr(tree, "tree_core", tree)
    first = page * limit
    shown = islice(_placed(core), first, first + limit)
    total = len(core._node_arena) - 1
    return {
        "page": page,
        "pages": -(-total // limit),
        "runs_total": total,
        "runs": [_run(node, level, start, core.clock.now_ms) for node, level, start in shown],
    }


def _placed(core: Any) -> Iterator[tuple[TenantTreeNode, int, int]]:
    """Yield (node, level, first token) of every node but the root, depth first."""
    stack = [(node, 0, 0) for node in reversed(core.root_node.children.values())]
    while stack:
        node, level, start = stack.pop()
        yield node, level, start
        end = start + len(node.key)
        stack += [(child, level + 1, end) for child in reversed(node.children.values())]


def _run(node: TenantTreeNode, level: int, start: int, now_ms: int) -> dict[str, Any]:
    return {
        "id": int(node.id),
        "level": level,
        "start": start,
        "tokens": len(node.key),
        "owner": node.owner,
        "tiers": [tier.value for tier in node.tiers],
        "age_ms": now_ms - node.access_ms,
        "hits": node.hits,
        "locks": node.component_data[BASE_COMPONENT_TYPE].lock_ref,
        "pins": node.pins,
    }

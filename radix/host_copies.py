"""Copies in host memory of pages that are in HBM too: who may lose its copy, and losing it.

SGLang's write-through keeps such a copy until the page has left HBM. Host memory no larger than HBM
then fills with copies of hot pages, and what the disk holds finds no room to come back. With a disk
below, the disk has these pages as well, so their copies leave in the same order as everything else
in host memory, from the end of a path: what has a copy below it keeps its own.
"""

from typing import Any

from sglang.srt.mem_cache.unified_cache.component_type import BASE_COMPONENT_TYPE

from sglang_ext.radix.node import TenantTreeNode

__all__ = ["free_host_leaf", "is_spare_copy"]


def is_spare_copy(core: Any, node: TenantTreeNode) -> bool:
    """Tell whether a node in HBM may lose its copy: nothing reads, writes or continues it. O(1)."""
    full = node.component_data[BASE_COMPONENT_TYPE]
    return (
        core.enable_storage
        and not node.host_children
        and full.host_value is not None
        and full.host_lock_ref == 0
        and node.write_through_pending_id is None
        and node.load_back_pending_id is None
        # A window or a state besides full attention has copies of its own.
        and len(core.components) == 1
    )


def free_host_leaf(
    core: Any,
    node: TenantTreeNode,
    tracker: dict[Any, int],
    device_frees: dict[Any, list[Any]],
    host_frees: dict[Any, list[Any]],
    cache_actions: list[Any],
) -> None:
    """Take one of ``evictable_host_leaves`` out of host memory; a node in HBM stays there.

    What is freed is added to the other arguments, as SGLang's own steps do.
    """
    found = (tracker, device_frees, host_frees)
    if node.component_data[BASE_COMPONENT_TYPE].value is None:
        core._evict_host_leaf(node, *found, cache_actions=cache_actions)
        return
    core._release_full_host_duplicate(node, *found, cache_actions=cache_actions)
    core.full_host_duplicates.pop(node.id, None)
    core._update_evictable_leaf_sets(node)

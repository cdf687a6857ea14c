"""Flushes a prefix: every text of one owner that begins with it, from every tier."""

from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

from sglang_ext.radix.hashes import text_hashes
from sglang_ext.radix.order import Reason
from sglang_ext.radix.sessions import Text
from sglang_ext.removal import Flushed, below, free_nodes
from sglang_ext.types import PUBLIC, Tier

__all__ = ["flush_prefix"]


def flush_prefix(cache: Any, key: Any) -> Flushed:
    """Remove the whole pages of ``key`` and all that continues them, pins included.

    Of the prefix itself, pages that other texts of the owner need stay. On disk goes what memory
    knows of, and the prefix itself; what continues it and is on disk alone cannot be found there
    without its text, and is of no use while the prefix is gone. Raises ValueError for a prefix
    that has no whole page behind the public text. O(pages that go).
    """
    key = cache.tree_core.own(key).page_aligned(cache.page_size)
    if key.owner == PUBLIC or len(key) == 0:
        page = cache.page_size
        raise ValueError(
            f"prefix: has no whole page of {page} tokens that is the tenant's own; expected a "
            "longer one"
        )
    found = cache.match_prefix(MatchPrefixParams(key=key))
    matched = int(found.device_prefix_len + found.host_hit_length)
    nodes: list[Any] = []
    if matched == len(key):
        nodes = _unneeded(cache.tree_core.node_by_id(found.best_match_node))
    pages = [page for node in nodes for page in node.hash_value or ()]
    disk_bytes = 0
    if cache.store is not None:
        pages += text_hashes(key, cache.page_size)[matched // cache.page_size :]
        disk_bytes = cache.store.delete_pages(key.owner, pages)
    cache.pins.remove_at(nodes)
    cache.sessions.forget_texts(Text(key.token_ids[: len(key)], key.extra_key, key.cache_salt))
    with cache.sessions.dropping():
        flushed = free_nodes(cache, nodes, (Tier.HBM, Tier.CPU), Reason.FLUSH)
    return flushed._replace(disk_bytes=disk_bytes)


def _unneeded(end: Any) -> list[Any]:
    """Return a node, all below it, and those above it that lead nowhere else, children first."""
    nodes, node = below(end), end
    while node.parent.parent is not None and len(node.parent.children) == 1:
        node = node.parent
        if node.owner == PUBLIC or node.sessions or node.pins:
            break
        nodes.append(node)
    return nodes

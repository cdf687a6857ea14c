"""KV events by owner: SGLang's stream for routers, in which no two tenants have a page in common.

SGLang hashes the pages of its events without the namespace, so that equal text of two tenants would
be one page to whoever listens, and it cannot follow a path that changes its owner. Here a page is
named by its hash in the lower tiers, which is chained to its owner, and ``cache_salt`` names that
owner (nothing: public), so that the stream alone tells who has what. Sealed owners do not appear.
"""

from typing import Any

from sglang.srt.disaggregation.kv_events import BlockStored
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.utils import compute_node_hash_values, hash_str_to_int64

from sglang_ext.namespace import shares_public
from sglang_ext.radix.hashes import node_hashes, turns_private
from sglang_ext.types import Owner

__all__ = ["OwnedEvents"]


class OwnedEvents(KVCacheEventRecorder):
    """Collects the KV events of one cache."""

    def __init__(self, stock: KVCacheEventRecorder) -> None:
        """Take the place of ``stock``, which has recorded nothing yet."""
        super().__init__(
            enabled=stock.enabled,
            page_size=stock.page_size,
            dynamo_format=stock.dynamo_format,
            lora_names=stock.lora_names,
        )
        self._owner: Owner | None = None

    def record_store(self, node: Any, medium: Any = None, *, session_id: str | None = None) -> None:
        if self.enabled and shares_public(node.owner):
            self._owner = node.owner or None
            super().record_store(node, medium, session_id=session_id)

    def record_remove(self, node: Any, medium: Any = None) -> None:
        if self.enabled and shares_public(node.owner):
            super().record_remove(node, medium)

    def enqueue(self, event: Any) -> None:
        if isinstance(event, BlockStored):
            event.cache_salt = self._owner
        super().enqueue(event)

    def _node_event_hash_values(self, node: Any) -> list[str]:
        """Return the node's page hashes; a parent has its own, since it was stored before."""
        if node.hash_value is None:
            hashes = node_hashes if turns_private(node) else compute_node_hash_values
            node.hash_value = hashes(node, self.page_size)
        hashed: list[str] = node.hash_value
        return hashed

    def _parent_block_hash(self, node: Any) -> int | None:
        if not node.parent.hash_value:
            return None
        return int(hash_str_to_int64(node.parent.hash_value[-1]))

    def _namespace_seed(self, node: Any) -> None:
        """The hashes have it already."""

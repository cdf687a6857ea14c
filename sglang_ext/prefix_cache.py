"""The cache that the scheduler talks to: SGLang's, over a tree that knows tenants."""

from typing import Any

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_ext.radix.clock import SharedClock
from sglang_ext.radix.ledger import Ledger
from sglang_ext.radix.public import PublicPrefixes

__all__ = ["TenantRadixCache"]


class TenantRadixCache(UnifiedRadixCache):
    """SGLang's prefix cache with one tree for all tenants, in which none sees another's nodes.

    ``tick`` must be called once per scheduler step, on every rank equally often.
    """

    tree_core: Any

    def __init__(self, params: Any, public: PublicPrefixes | None = None) -> None:
        super().__init__(params)
        alone = self.tp_world_size == 1 and self.pp_size == 1
        self.clock = SharedClock(None if alone else self._latest)
        self.tree_core.clock = self.clock
        self.ledger: Ledger = self.tree_core.ledger
        self.ledger.bytes_per_token = _bytes_per_token(params.token_to_kv_pool_allocator)
        if public is not None:
            self.tree_core.public = public

    def tick(self) -> int:
        """Advance the shared clock and return it in milliseconds. One all-reduce, none alone."""
        return self.clock.tick()

    def _latest(self, now_ms: int) -> int:
        """Return the latest time of all ranks."""
        stamp = torch.tensor(now_ms, dtype=torch.int64)
        self._all_reduce(stamp, torch.distributed.ReduceOp.MAX)
        return int(stamp.item())

    def prefetch_from_storage(
        self,
        request: Any,
        last_host_node_id: int,
        new_input_tokens: Any,
        last_hash: str | None = None,
        prefix_keys: list[str] | None = None,
        matched_prefix_tokens: Any = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        storage_hit_end: int | None = None,
    ) -> bool | None:
        """Fetch one side of the public boundary: its pages carry no namespace, ours do."""
        key = RadixKey(new_input_tokens, extra_key, cache_salt=cache_salt)
        plan = self.tree_core.fetch_plan(last_host_node_id, key)
        decision: bool | None = super().prefetch_from_storage(
            request,
            last_host_node_id,
            new_input_tokens[: plan.units + int(self.tree_core.is_eagle)],
            plan.last_hash,
            prefix_keys,
            matched_prefix_tokens,
            plan.extra_key,
            plan.cache_salt,
            storage_hit_end,
        )
        return decision

    def query_storage_hit_length(
        self,
        last_host_node_id: int,
        new_input_tokens: Any,
        last_hash: str | None = None,
        prefix_keys: list[str] | None = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
    ) -> int:
        """Ask for what ``prefetch_from_storage`` would fetch."""
        key = RadixKey(new_input_tokens, extra_key, cache_salt=cache_salt)
        plan = self.tree_core.fetch_plan(last_host_node_id, key)
        found: int = super().query_storage_hit_length(
            last_host_node_id,
            new_input_tokens[: plan.units + int(self.tree_core.is_eagle)],
            plan.last_hash,
            prefix_keys,
            plan.extra_key,
            plan.cache_salt,
        )
        return found


def _bytes_per_token(allocator: Any) -> int:
    """Return the bytes of one token's KV over all layers of this rank, 0 when unknown."""
    pool = allocator.get_kvcache()
    if not hasattr(pool, "get_kv_size_bytes"):
        return 0
    size = pool.get_kv_size_bytes()
    total = sum(size) if isinstance(size, tuple) else size
    return int(total // (pool.size + pool.page_size))

"""The cache that the scheduler talks to: SGLang's, over a tree that knows tenants."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_ext.namespace import parse
from sglang_ext.radix.clock import SharedClock
from sglang_ext.radix.ledger import Ledger
from sglang_ext.radix.public import PublicPrefixes
from sglang_ext.types import Owner, OwnerLimits, Tier

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
        self.requesters: frozenset[Owner] = frozenset()
        if public is not None:
            self.tree_core.public = public

    def tick(self) -> int:
        """Advance the shared clock and return it in milliseconds. One all-reduce, none alone."""
        return self.clock.tick()

    # ---- who may have how much

    def owner_of(self, req: Any) -> Owner:
        """Return who owns what a request computes."""
        return parse(req.extra_key).owner

    def limits(self, owner: Owner, tier: Tier = Tier.HBM) -> OwnerLimits:
        """Return what ``owner`` may hold in ``tier``."""
        return OwnerLimits()

    @contextmanager
    def as_requester(self, owners: Iterable[Owner]) -> Iterator[None]:
        """Within, sizes and victims are those of a request, or batch, of ``owners``."""
        before, self.requesters = self.requesters, frozenset(owners)
        try:
            yield
        finally:
            self.requesters = before

    def headroom(self, owner: Owner) -> int:
        """Return how many more tokens ``owner`` may get running now."""
        return int(self.token_to_kv_pool_allocator.available_size() + self.evictable_size())

    def fits_ever(self, owner: Owner, tokens: int) -> str | None:
        """Return why a request of ``tokens`` can never be served, None when it can."""
        pool = int(self.token_to_kv_pool_allocator.size)
        if tokens <= pool:
            return None
        return f"the request needs {tokens} tokens of KV cache, the pool has {pool}"

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

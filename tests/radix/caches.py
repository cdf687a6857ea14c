"""SGLang's real caches over small CPU pools, ours and its own side by side."""

from array import array
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.allocator import (
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_ext.cache_backend import register_backend
from sglang_ext.namespace import frame
from sglang_ext.prefix_cache import TenantRadixCache
from sglang_ext.radix.component import TenantFullComponent
from sglang_ext.radix.public import PublicPrefixes
from sglang_ext.types import Owner

__all__ = ["Rig", "make_params", "make_rig", "make_stock_rig", "namespace"]


def namespace(owner: str) -> str:
    """Return the extra_key of a tenant's requests."""
    return frame(Owner(owner))


def make_params(tokens: int, page_size: int, **changes: Any) -> CacheInitParams:
    """Return the parameters of a cache over ``tokens`` slots on the CPU."""
    pool = SimpleNamespace(store_dtype=torch.bfloat16, page_size=page_size)
    args = {"dtype": torch.bfloat16, "device": "cpu", "kvcache": pool, "need_sort": False}
    allocator = (
        TokenToKVPoolAllocator(tokens, **args)
        if page_size == 1
        else PagedTokenToKVPoolAllocator(tokens, page_size, **args)
    )
    return CacheInitParams(
        disable=False,
        req_to_token_pool=ReqToTokenPool(16, 4096, "cpu", enable_memory_saver=False),
        token_to_kv_pool_allocator=allocator,
        page_size=page_size,
        tree_components=(ComponentType.FULL,),
        **changes,
    )


class Rig:
    """One cache with short calls: keys from lists of ints, slots from its own allocator."""

    def __init__(self, cache: UnifiedRadixCache) -> None:
        self.cache = cache
        self.core: Any = cache.tree_core
        self.allocator = cache.token_to_kv_pool_allocator
        self.page_size = cache.page_size
        self.size = self.allocator.available_size()

    def key(self, tokens: list[int], owner: str = "t:a", salt: str | None = None) -> RadixKey:
        return RadixKey(array("q", tokens), namespace(owner), cache_salt=salt)

    def match(self, tokens: list[int], owner: str = "t:a", salt: str | None = None) -> Any:
        return self.cache.match_prefix(MatchPrefixParams(key=self.key(tokens, owner, salt)))

    def hit(self, tokens: list[int], owner: str = "t:a", salt: str | None = None) -> int:
        return int(self.match(tokens, owner, salt).device_prefix_len)

    def insert(self, tokens: list[int], owner: str = "t:a", salt: str | None = None) -> Any:
        """Compute what is not cached yet and insert it, as a finished request does."""
        whole = len(tokens) // self.page_size * self.page_size
        tokens = tokens[:whole]
        found = self.match(tokens, owner, salt)
        lock = self.cache.lock(found.last_device_node)
        slots = self.alloc(whole - found.device_prefix_len)
        cached = self.core.collect_full_device_indices(
            found.last_device_node, self.core.root_node_handle()
        )
        value = torch.cat((cached, slots))
        result = self.cache.insert(
            InsertParams(
                key=self.key(tokens, owner, salt),
                value=value,
                prev_prefix_len=found.device_prefix_len,
                inserted_len=found.device_prefix_len,
            )
        )
        self.cache.unlock(lock)
        return result

    def alloc(self, tokens: int) -> torch.Tensor:
        """Return fresh slots, evicting as SGLang does when there are too few."""
        if tokens == 0:
            return torch.empty(0, dtype=torch.int64)
        short = tokens - self.allocator.available_size()
        if short > 0:
            self.cache.evict_for_alloc(EvictParams(num_tokens=short))
        slots = self.allocator.alloc(tokens)
        assert slots is not None, f"no room for {tokens} tokens"
        return slots

    def evict(self, tokens: int) -> int:
        return int(self.cache.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted)

    def accounted(self) -> int:
        """Return what the scheduler's idle check adds up; must stay at ``size``."""
        cache = self.cache
        return int(
            self.allocator.available_size() + cache.evictable_size() + cache.protected_size()
        )


def make_rig(
    tokens: int = 1024,
    page_size: int = 1,
    public: list[list[int]] | None = None,
    **changes: Any,
) -> Rig:
    """Return a rig over our cache, with these public prefixes."""
    register_backend()
    params = make_params(tokens, page_size, **changes)
    params.tree_core_backend = "sglang_ext"
    params.component_registry_override = {ComponentType.FULL: TenantFullComponent}
    return Rig(TenantRadixCache(params, PublicPrefixes(public or [], page_size)))


def make_stock_rig(tokens: int = 1024, page_size: int = 1, backend: str = "python") -> Rig:
    """Return a rig over SGLang's own cache with its Python or Rust tree core."""
    params = make_params(tokens, page_size)
    params.tree_core_backend = backend
    return Rig(UnifiedRadixCache(params))

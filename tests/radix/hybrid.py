"""Caches of hybrid models over small CPU pools: a window or a Mamba state beside full KV."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.runtime_context import get_context

from sglang_ext.cache_backend import register_backend
from sglang_ext.prefix_cache import TenantRadixCache
from sglang_ext.radix.component import TenantFullComponent
from sglang_ext.radix.integrity import check_integrity
from sglang_ext.radix.public import PublicPrefixes
from tests.radix.caches import Rig, make_params

__all__ = ["StateRig", "WindowRig", "state_rig", "window_rig"]


class WindowRig(Rig):
    """A rig whose every other layer sees a window; both pools have ``size`` slots."""

    def alloc(self, tokens: int) -> torch.Tensor:
        """Return fresh slots of both pools."""
        self.make_room(tokens)
        if self.page_size == 1 or tokens == 0:
            return super().alloc(tokens)
        start, end, before = torch.tensor([0]), torch.tensor([tokens]), torch.tensor([-1])
        slots = self.allocator.alloc_extend(start, start, end, end, before, tokens)
        assert slots is not None, f"no room for {tokens} tokens"
        return slots

    def make_room(self, tokens: int) -> None:
        full, window = self.allocator.full_available_size(), self.allocator.swa_available_size()
        self.cache.evict(EvictParams(num_tokens=max(0, tokens - full)))
        self.cache.evict(EvictParams(swa_num_tokens=max(0, tokens - window)))

    def check(self) -> None:
        """SGLang's own check of both components, ours, and that neither pool lost a slot."""
        self.core.sanity_check([], [])
        check_integrity(self.cache)
        cache, allocator = self.cache, self.allocator
        full = cache.full_evictable_size() + cache.full_protected_size()
        window = cache.swa_evictable_size() + cache.swa_protected_size()
        assert allocator.full_available_size() + full == self.size
        assert allocator.swa_available_size() + window == self.size


def window_rig(slots: int, window: int, page_size: int, public: list[list[int]]) -> WindowRig:
    params = make_params(
        slots, page_size, sliding_window_size=window, tree_core_backend="sglang_ext"
    )
    pool = SWAKVPool(slots, slots, page_size, torch.bfloat16, 1, 8, [0], [1], "cpu")
    params.token_to_kv_pool_allocator = SWATokenToKVPoolAllocator(
        slots, slots, page_size, torch.bfloat16, "cpu", pool, False
    )
    params.tree_components = (ComponentType.FULL, ComponentType.SWA)
    return WindowRig(_cache(params, page_size, public))


class StateRig(Rig):
    """A rig of a hybrid model: a text is of use only where the state at its end is kept."""

    def __init__(self, cache: TenantRadixCache) -> None:
        super().__init__(cache)
        self.states = cache.req_to_token_pool.mamba_allocator
        self.state_slots = self.states.available_size()

    def insert_state(self, tokens: list[int], owner: str) -> Any:
        """Compute a text and insert it with the state at its end, as a finished request does."""
        found = self.match(tokens, owner)
        lock = self.cache.lock(found.last_device_node)
        cached = self.core.collect_full_device_indices(
            found.last_device_node, self.core.root_node_handle()
        )
        state = self._alloc_state()
        value = torch.cat((cached, self.alloc(len(tokens) - len(cached))))
        result = self.cache.insert(
            InsertParams(
                key=self.key(tokens, owner),
                value=value,
                mamba_value=state,
                prev_prefix_len=len(cached),
            )
        )
        if result.mamba_exist:
            self.states.free(state)
        self.cache.unlock(lock)
        return result

    def _alloc_state(self) -> torch.Tensor:
        state = self.states.alloc(1)
        if state is None:
            self.cache.evict_for_alloc(EvictParams(num_tokens=0, mamba_num=1))
            state = self.states.alloc(1)
        assert state is not None, "no room for a state"
        return state

    def check(self) -> None:
        """SGLang's own check of both components, ours, and that neither pool lost a slot."""
        self.core.sanity_check([], [])
        check_integrity(self.cache)
        assert self.accounted() == self.size
        cache = self.cache
        held = cache.mamba_evictable_size() + cache.mamba_protected_size()
        assert self.states.available_size() + held == self.state_slots


@contextmanager
def state_rig(slots: int, states: int, public: list[list[int]]) -> Iterator[StateRig]:
    """Yield a rig with ``slots`` of full KV and ``states`` of Mamba, page size 1."""
    with get_context().override_server_args() as server_args:
        server_args._mamba_cache_chunk_size = 1
        params = make_params(slots, 1, tree_core_backend="sglang_ext")
        shape = Mamba2StateShape.create(
            tp_world_size=1,
            intermediate_size=8,
            n_groups=1,
            num_heads=2,
            head_dim=4,
            state_size=4,
            conv_kernel=4,
        )
        dtype = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
        params.req_to_token_pool = HybridReqToTokenPool(
            size=8,
            mamba_size=states,
            mamba_spec_state_size=8,
            max_context_len=4096,
            device="cpu",
            enable_memory_saver=False,
            cache_params=Mamba2CacheParams(shape=shape, layers=[0], dtype=dtype),
            mamba_layer_ids=[0],
            enable_mamba_extra_buffer=False,
        )
        params.tree_components = (ComponentType.FULL, ComponentType.MAMBA)
        yield StateRig(_cache(params, 1, public))


def _cache(params: Any, page_size: int, public: list[list[int]]) -> TenantRadixCache:
    register_backend()
    params.component_registry_override = {ComponentType.FULL: TenantFullComponent}
    return TenantRadixCache(params, PublicPrefixes(public, page_size))

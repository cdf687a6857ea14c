"""A real cache over real pools on the CPU, with a host tier and, if wanted, our store below it."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.runtime_context import get_context, get_parallel

from sglang_ext.cache_backend import register_backend
from sglang_ext.patches.hicache_cpu import enable_hicache
from sglang_ext.prefix_cache import TenantRadixCache
from sglang_ext.radix.component import TenantFullComponent
from sglang_ext.radix.integrity import check_integrity
from sglang_ext.radix.public import PublicPrefixes
from sglang_ext.residency import Residency
from sglang_ext.tenancy.loader import parse_policy
from sglang_ext.tier_flags import STORAGE_CONFIG
from sglang_ext.tiering.placement import Lifetime
from sglang_ext.tiering.worth import LoadOrCompute
from sglang_ext.tiers import TenantStore
from sglang_ext.types import Owner
from tests.radix.caches import Rig

PAGE = 4
HBM = 64
CPU = 128


class Clock:
    """Milliseconds that only a test advances."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


class TieredRig(Rig):
    """A rig whose time a test moves, and whose copies it waits for."""

    def __init__(self, cache: TenantRadixCache) -> None:
        super().__init__(cache)
        self.time = Clock()
        cache.clock._read, cache.clock.now_ms = self.time, 0
        # One page is worth a fetch as long as nothing was measured.
        cache.worth = LoadOrCompute(PAGE)
        cache.worth.agree(cache.worth.proposal())

    def settle(self) -> None:
        """Let copies to and from host memory end, as the scheduler does between two batches."""
        cache = self.cache
        while cache.ongoing_write_through or cache.ongoing_load_back or cache.ongoing_backup:
            cache.check_hicache_events()
        check_integrity(self.cache)

    def write(self, tokens: list[int], owner: str = "t:a") -> None:
        """Compute a text, and let its copy go down."""
        self.insert(tokens, owner)
        self.settle()

    def later(self, milliseconds: int) -> None:
        """Advance the time and let pages age."""
        self.time.now += milliseconds
        self.cache.tick()
        check_integrity(self.cache)
        self.settle()

    def where(self, tokens: list[int], owner: str = "t:a") -> tuple[int, int]:
        """Return how many leading tokens of a text lie in HBM, and how many more only in CPU.

        Looking is a use; it begins a new life of what it finds.
        """
        found = self.match(tokens, owner)
        return int(found.device_prefix_len), int(found.host_hit_length)

    def age(self, lives: Mapping[str, Lifetime], watermark: int = 0, **changes: Any) -> None:
        """Let pages of these owners age."""
        found = {Owner(owner): life for owner, life in lives.items()}
        self.cache.residency = Residency(self.cache, found, watermark, **changes)


@contextmanager
def tiered(
    folder: Path | None = None,
    public: list[list[int]] | None = None,
    cpu: int = CPU,
    tenants: str = "a: {}, b: {}",
    master_key: str | None = None,
    remote_bytes: int | None = None,
) -> Iterator[TieredRig]:
    """Yield a rig with HBM and ``cpu`` tokens of CPU, and with the NVMe tier in ``folder``.

    ``remote_bytes``: with a remote tier too, on a store that the test puts in Mooncake's place.
    """
    enable_hicache()
    register_backend()
    extra = {
        **STORAGE_CONFIG,
        "folder": str(folder),
        "total_bytes": 2**24,
        "weights_hash": "w",
        "depth": 2,
        "prefetch_threshold": PAGE,
        **({} if master_key is None else {"master_key": master_key}),
    }
    if remote_bytes is not None:
        extra["remote"] = {"master": "nowhere:1", "total_bytes": remote_bytes}
    storage = {
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(extra),
    }
    fields = {
        "enable_hierarchical_cache": True,
        "hicache_ratio": cpu / HBM,
        "hicache_io_backend": "direct",
        "hicache_mem_layout": "layer_first",
        "served_model_name": "tiny",
        **({} if folder is None else storage),
    }
    ranks = dict.fromkeys(("tp_rank", "pp_rank", "attn_cp_rank", "attn_dcp_rank"), 0)
    with (
        get_context().override_server_args(**fields) as server_args,
        get_parallel().override(**ranks),
    ):
        params = _params()
        cache = TenantRadixCache(params, PublicPrefixes(public or [], PAGE))
        cache.init_hicache(server_args, params)
        policy = parse_policy(f"version: 1\ntenants: {{{tenants}}}")
        if folder is not None:
            backend = cache.cache_controller.storage_backend
            cache.store = TenantStore(backend, policy, lambda: "other weights")
        yield TieredRig(cache)
        if folder is not None:
            cache.cache_controller.detach_storage_backend()


def _params() -> CacheInitParams:
    pool = MHATokenToKVPool(HBM, PAGE, torch.bfloat16, 2, 8, 2, "cpu", False)
    allocator = PagedTokenToKVPoolAllocator(
        HBM, PAGE, dtype=torch.bfloat16, device="cpu", kvcache=pool, need_sort=False
    )
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=ReqToTokenPool(4, 256, "cpu", enable_memory_saver=False),
        token_to_kv_pool_allocator=allocator,
        page_size=PAGE,
        tree_components=(ComponentType.FULL,),
    )
    params.tree_core_backend = "sglang_ext"
    params.component_registry_override = {ComponentType.FULL: TenantFullComponent}
    return params

"""Registers the tenant-aware cache with SGLang as ``--radix-cache-backend sglang_ext``."""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.registry import (
    create_unified_radix_cache,
    get_radix_cache_factory,
    register_radix_cache_backend,
)
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.tree_core_registry import (
    get_tree_core_factory,
    register_tree_core_backend,
)
from sglang.srt.runtime_context import get_memory

from sglang_ext import active
from sglang_ext.errors import PolicyError, UnsupportedError
from sglang_ext.lifespans import Lifespans
from sglang_ext.prefix_cache import TenantRadixCache
from sglang_ext.radix.component import TenantFullComponent
from sglang_ext.radix.public import PublicPrefixes
from sglang_ext.radix.tree_core import TenantTreeCore
from sglang_ext.residency import Residency, lifetimes
from sglang_ext.sealing import Sealing
from sglang_ext.tenancy.policy import Loading, Policy
from sglang_ext.tenancy.quota import QuotaBook
from sglang_ext.tenancy.units import SizeUnit
from sglang_ext.tiers import complete_storage_config, tenant_store
from sglang_ext.types import Tier

__all__ = ["BACKEND", "create_cache", "quota_books", "register_backend", "residency", "watermark"]

BACKEND = "sglang_ext"

PrefixSource = Callable[[Any], PublicPrefixes]
"""Makes the public prefixes of a cache from SGLang's TreeCacheBuildContext."""


def register_backend(
    prefixes: PrefixSource | None = None, check: Callable[[], None] = lambda: None
) -> None:
    """Register cache and tree under BACKEND in this process; again is a no-op.

    ``prefixes`` is called once for each cache that SGLang builds; without it nothing is public.
    ``check`` raises where the process would serve without isolation; the scheduler then ends.
    """

    def build(ctx: Any) -> TenantRadixCache:
        check()
        return create_cache(ctx, prefixes)

    if get_radix_cache_factory(BACKEND) is None:
        register_radix_cache_backend(BACKEND, build)
    if get_tree_core_factory(BACKEND) is None:
        register_tree_core_backend(BACKEND, TenantTreeCore)


def create_cache(ctx: Any, prefixes: PrefixSource | None = None) -> TenantRadixCache:
    """Build the cache of one scheduler from SGLang's TreeCacheBuildContext.

    Raises UnsupportedError for a mode in which tenants could not be kept apart or limited, and
    PolicyError where the policy in force does not fit the engine's memory.
    """
    public = prefixes(ctx) if prefixes is not None else PublicPrefixes((), ctx.params.page_size)
    _refuse_unsupported(ctx, public)
    ctx.params.tree_core_backend = BACKEND
    ctx.params.component_registry_override = {
        **(ctx.params.component_registry_override or {}),
        ComponentType.FULL: TenantFullComponent,
    }
    if active.has_policy():
        complete_storage_config(ctx, active.policy())
    cache: TenantRadixCache = create_unified_radix_cache(
        ctx, cache_class=lambda params: TenantRadixCache(params, public)
    )
    if active.has_policy():
        cache.sealing = _sealing(ctx, cache)
        cache.sealing.check(active.policy())
        cache.limit(quota_books(active.policy(), cache))
        cache.worth.always = active.policy().tiers.load is Loading.ALWAYS
        cache.store = tenant_store(ctx, cache, active.policy())
        cache.residency = residency(active.policy(), cache)
        cache.lifespans = Lifespans(cache, lifetimes(active.policy()))
    return cache


def quota_books(policy: Policy, cache: TenantRadixCache) -> list[QuotaBook]:
    """Return what owners may hold in the tiers that ``cache`` has in memory.

    Sizes in bytes are those of all ranks together. Raises PolicyError where the policy does not fit
    the pools of this engine.
    """
    pools = {Tier.HBM: cache.token_to_kv_pool_allocator, Tier.CPU: cache.host_pool_group}
    token_bytes = cache.ledger.bytes_per_token * cache.tp_world_size
    return [
        QuotaBook(policy, tier, int(pool.size), token_bytes)
        for tier, pool in pools.items()
        if pool is not None
    ]


def residency(policy: Policy, cache: TenantRadixCache) -> Residency | None:
    """Return what ages the pages of ``cache``; None where they have nowhere to go and may stay."""
    found = lifetimes(policy)
    if cache.cache_controller is None and not any(life.strict for life in found.values()):
        return None
    return Residency(cache, found, watermark(policy, cache))


def watermark(policy: Policy, cache: TenantRadixCache) -> int:
    """Return how many tokens of HBM are kept free. Raises PolicyError where nobody can tell."""
    size, token_bytes = policy.tiers.hbm.watermark, cache.ledger.bytes_per_token
    if size.unit is SizeUnit.BYTES and not token_bytes:
        problem = f"found {size}, but this engine does not say how many bytes a token takes"
        raise PolicyError("tiers.hbm.watermark", f"{problem}; expected a percentage or tokens")
    capacity = int(cache.token_to_kv_pool_allocator.size)
    return size.to_tokens(capacity, token_bytes * cache.tp_world_size)


def _sealing(ctx: Any, cache: TenantRadixCache) -> Sealing:
    """Return what follows sealed pages; on a GPU, zeroing them waits for the batch in flight."""
    runner = ctx.tp_worker.model_runner

    def settle() -> None:
        module = torch.get_device_module(runner.device)
        module.current_stream().wait_stream(runner.forward_stream)

    on_cpu = torch.device(runner.device).type == "cpu"
    speculative = ctx.server_args.speculative_algorithm is not None
    return Sealing(cache, speculative=speculative, settle=(lambda: None) if on_cpu else settle)


def _refuse_unsupported(ctx: Any, public: PublicPrefixes) -> None:
    params = ctx.params
    if params.eviction_policy.lower() != "lru" and not params.disable:
        raise UnsupportedError(
            f"--radix-eviction-policy {params.eviction_policy} does not work with "
            f"--radix-cache-backend {BACKEND}, which decides by tenant and recency; use lru"
        )
    if params.enable_session_radix_cache:
        raise UnsupportedError(
            "--enable-session-radix-cache keeps sessions longer than anything else, whoever owns "
            f"them, and does not work with --radix-cache-backend {BACKEND}; drop the flag"
        )
    if public and ctx.enable_hierarchical_cache and _only_buffers():
        raise UnsupportedError(
            "--hicache-host-memory-mode buffer_only does not work with public_prefixes: its keys "
            "of the lower tiers do not know where a text turns private; drop one of the two"
        )


def _only_buffers() -> bool:
    return str(get_memory().hicache_host_memory_mode) == "buffer_only"

"""Where pages of sealed owners lie in the pools of one cache, and what becomes of them.

computed     patches.scheduling    run_batch notes the slots that a batch is about to write
copied down  TenantRadixCache      the slots in host memory
from disk    ExtStorage            the same, before a byte is read into them
loaded back  TenantRadixCache      the slots in HBM
freed        patches.sealed_pages  zeroed on the way to the free list
"""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from sglang_ext.errors import UnsupportedError
from sglang_ext.namespace import is_sealed
from sglang_ext.tenancy.policy import Policy
from sglang_ext.tiering.sealed_pages import SealedPages
from sglang_ext.tiering.storage_backend import ExtStorage

__all__ = ["Sealing"]

_ALLOCATORS = (PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator)
_POOLS = (MHATokenToKVPool, MLATokenToKVPool)
"""Exactly these: what a subclass adds may hold text too, and would not be zeroed."""


class Sealing:
    """The sealed pages in HBM and in host memory of one cache.

    ``problem`` says why this engine cannot serve sealed tenants; None where it can. ``settle`` is
    called before pages in HBM are zeroed, so that no batch in flight still writes to them.
    """

    def __init__(
        self,
        cache: Any,
        *,
        speculative: bool = False,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self._hbm: SealedPages | None = None
        self._cpu: SealedPages | None = None
        self._settle = settle
        self.problem = _problem(cache, speculative)
        if self.problem is None:
            self._follow(cache)

    def check(self, policy: Policy) -> None:
        """Raise UnsupportedError where the policy has a sealed tenant that cannot be served."""
        sealed = [tenant.name for tenant in policy.tenants.values() if is_sealed(tenant.owner)]
        if sealed and self.problem is not None:
            raise UnsupportedError(
                f"tenants.{sealed[0]}.isolation: {policy.tenants[sealed[0]].isolation} "
                f"does not work with {self.problem}"
            )

    def in_hbm(self, slots: torch.Tensor | None) -> None:
        """Note slots in HBM that are about to get, or just got, bytes of a sealed owner."""
        if self._hbm is not None and slots is not None:
            self._hbm.note(slots)

    def in_cpu(self, slots: torch.Tensor | None) -> None:
        """Note slots in host memory."""
        if self._cpu is not None and slots is not None:
            self._cpu.note(slots)

    def _follow(self, cache: Any) -> None:
        allocator = cache.token_to_kv_pool_allocator
        self._hbm = allocator.sealed_pages = self._of_device(allocator)
        controller = cache.cache_controller
        if controller is None:
            return
        pool = controller.mem_pool_host.anchor_entry.host_pool
        self._cpu = pool.sealed_pages = _of_host(pool)
        if isinstance(controller.storage_backend, ExtStorage):
            controller.storage_backend.before_sealed_read = self.in_cpu

    def _of_device(self, allocator: Any) -> SealedPages:
        size, pool = int(allocator.page_size), allocator.get_kvcache()
        rows = 1 if _layout(pool) == "hnd" else size
        layers = [_by_page(layer, rows) for layer in _buffers(pool)]

        def wipe(pages: torch.Tensor) -> None:
            self._settle()
            for layer in layers:
                layer.index_fill_(0, pages, 0)

        return SealedPages(layers[0].shape[0], size, wipe, layers[0].device)


def _of_host(pool: Any) -> SealedPages:
    size = int(pool.page_size)

    def wipe(pages: torch.Tensor) -> None:
        for page in pages.tolist():
            pool.get_data_page(page * size, flat=False).zero_()

    return SealedPages(int(pool.page_num), size, wipe)


def _buffers(pool: Any) -> list[torch.Tensor]:
    """Return what holds K and V of each layer, ``[slots, ...]`` or ``[pages, ...]``."""
    if isinstance(pool, MLATokenToKVPool):
        return list(pool.kv_buffer)
    return [*pool.k_buffer, *pool.v_buffer]


def _layout(pool: Any) -> str:
    return str(getattr(pool, "kv_cache_layout", "nhd"))


def _by_page(layer: torch.Tensor, rows: int) -> torch.Tensor:
    """View a layer, of which ``rows`` are a page, as one row of numbers a page.

    The widest type that fits, whatever the layer holds: filling bytes takes ten times as long.
    """
    pages = layer.shape[0] // rows
    row_bytes = layer[:rows].numel() * layer.element_size()
    flat = layer[: pages * rows].view(pages, -1).view(torch.uint8)
    return flat.view(torch.int64) if row_bytes % 8 == 0 else flat


def _problem(cache: Any, speculative: bool) -> str | None:
    allocator, controller = cache.token_to_kv_pool_allocator, cache.cache_controller
    pool = allocator.get_kvcache()
    if len(cache.tree_components) > 1 or cache.sidecar_pool_specs:
        return "a model that keeps a window, a state or an index besides full attention"
    if type(allocator) not in _ALLOCATORS or type(pool) not in _POOLS:
        return f"{type(allocator).__name__} over {type(pool).__name__}"
    if _layout(pool) not in ("nhd", "hnd"):
        return f"pages in the layout {_layout(pool)}"
    if speculative:
        return "--speculative-algorithm, whose draft model keeps pages of its own"
    if cache.buffer_pipeline is not None:
        return "--hicache-host-memory-mode buffer_only"
    backend = None if controller is None else controller.storage_backend
    if backend is not None and not isinstance(backend, ExtStorage):
        return "a storage backend other than tiers.nvme, which does not encrypt"
    return None

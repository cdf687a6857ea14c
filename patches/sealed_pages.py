"""Hooks on the free lists of SGLang's pools: sealed pages are zeroed before they join one.

The last function before a free list, not its many callers: eviction, flush, abort, retraction, the
tail of a request and duplicates that an insert finds all end here. A pool without an attribute
``sealed_pages`` (see ``sglang_ext.sealing``) is left alone.
"""

from collections.abc import Callable
from typing import Any

import torch

from sglang_ext.patches.hooks import Hook
from sglang_ext.tiering.sealed_pages import SealedPages

__all__ = ["sealed_pages_hooks"]

_ALLOCATORS = "sglang.srt.mem_cache.allocator"
_PAGED = f"{_ALLOCATORS}.paged.PagedTokenToKVPoolAllocator"
_TOKENS = f"{_ALLOCATORS}.token.TokenToKVPoolAllocator"
_HOST = "sglang.srt.mem_cache.pool_host.base.HostKVCache"


def sealed_pages_hooks() -> list[Hook]:
    """Return the hooks; they hold for every pool of the process."""
    return [
        Hook(f"{_PAGED}._release_page_ids", _release_pages, ("self", "page_ids")),
        Hook(f"{_TOKENS}.free", _free_slots, ("self", "free_index")),
        Hook(f"{_HOST}.free", _free_slots, ("self", "indices")),
        *(Hook(f"{pool}.clear", _clear, ("self",)) for pool in (_PAGED, _TOKENS, _HOST)),
    ]


def _release_pages(original: Callable[..., None], pool: Any, *page_ids: torch.Tensor) -> None:
    sealed = _sealed(pool)
    if sealed is not None:
        for pages in page_ids:
            sealed.freed(pages)
    original(pool, *page_ids)


def _free_slots(original: Callable[..., Any], pool: Any, slots: torch.Tensor) -> Any:
    sealed = _sealed(pool)
    if sealed is not None:
        sealed.freed_slots(slots)
    return original(pool, slots)


def _clear(original: Callable[..., None], pool: Any) -> None:
    sealed = _sealed(pool)
    if sealed is not None:
        sealed.freed_all()
    original(pool)


def _sealed(pool: Any) -> SealedPages | None:
    found: SealedPages | None = getattr(pool, "sealed_pages", None)
    return found

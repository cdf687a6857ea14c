"""The cache that the scheduler talks to: SGLang's, over a tree that knows tenants."""

from typing import Any

from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_ext.radix.public import PublicPrefixes

__all__ = ["TenantRadixCache"]


class TenantRadixCache(UnifiedRadixCache):
    """SGLang's prefix cache with one tree for all tenants, in which none sees another's nodes."""

    tree_core: Any

    def __init__(self, params: Any, public: PublicPrefixes | None = None) -> None:
        super().__init__(params)
        if public is not None:
            self.tree_core.public = public

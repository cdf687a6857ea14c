"""One tier of a simulated engine: the real tree, ledger, quotas and ages over a pool of nothing.

A unit stands for a block of tokens; the tree counts units, and no tensor holds anything. Each tier
has a tree of its own, since pages are copied down when they are computed and leave each tier by its
own order: so a tier holds what the real one would, and its ledger says whose it is.
"""

from array import array
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_ext.cache_backend import BACKEND, register_backend
from sglang_ext.namespace import frame
from sglang_ext.prefix_cache import TenantRadixCache
from sglang_ext.radix.clock import SharedClock
from sglang_ext.radix.component import TenantFullComponent
from sglang_ext.residency import Residency
from sglang_ext.tenancy.quota import QuotaBook
from sglang_ext.tiering.placement import Lifetime
from sglang_ext.types import Owner, OwnerLimits, Tier

__all__ = ["Held", "SimulatedTier"]

_AHEAD = 100
"""Room is made for a hundredth of the tier at once: the server keeps a watermark free."""


class Held(NamedTuple):
    """Units that were there before, and the function that ends the stay of the whole text."""

    present: int
    release: Callable[[], None]


class _Slots:
    """So many slots, cut and counted as a tensor of their indices is, but never read."""

    __slots__ = ("_count",)

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, part: slice) -> "_Slots":
        start, stop, _ = part.indices(self._count)
        return _Slots(max(0, stop - start))

    def numel(self) -> int:
        return self._count

    def clone(self) -> "_Slots":
        return self


class _Pool:
    """Counts slots, as SGLang's allocator of them does, and hands out none."""

    page_size = 1
    device = "cpu"
    dtype = torch.bfloat16

    def __init__(self, size: int) -> None:
        self.size = self.size_full = self._free = size

    def available_size(self) -> int:
        return self._free

    def schedulable_available_size(self) -> int:
        return self._free

    def alloc(self, count: int) -> None:
        self._free -= count

    def free_segment(self, slots: _Slots, start_pos: int = 0) -> None:
        self._free += len(slots)

    def get_kvcache(self) -> Any:
        return SimpleNamespace(store_dtype=torch.bfloat16, page_size=1)


class SimulatedTier:
    """Holds ``units`` units. ``now_ms`` is the virtual clock that pages age by."""

    def __init__(
        self,
        units: int,
        now_ms: Callable[[], int],
        book: QuotaBook | None = None,
        unit_tokens: int = 1,
        lifetimes: Mapping[Owner, Lifetime] | None = None,
    ) -> None:
        """``book`` counts in tokens, of which a unit has ``unit_tokens``.

        ``lifetimes`` are those of this tier alone: their ``hbm_ms`` is what counts.
        """
        self._pool = _Pool(units)
        self._cache = _make_cache(self._pool)
        self._cache.clock = self._cache.tree_core.clock = SharedClock(read=now_ms)
        self._limited = book is not None
        if book is not None:
            self._cache.limit([_in_units(book, unit_tokens)])
        if lifetimes is not None:
            self._cache.residency = Residency(self._cache, lifetimes)

    @property
    def capacity(self) -> int:
        """Units in all."""
        return self._pool.size

    @property
    def free(self) -> int:
        """Units that hold nothing."""
        return self._pool.available_size()

    @property
    def evictions(self) -> Mapping[Any, int]:
        """Units evicted by owner, tier and reason, as the tree counts them."""
        return self._cache.evictions

    def tick(self) -> None:
        """Let pages age. O(1) within a tenth of a second, else O(owners + freed)."""
        self._cache.tick()

    def held(self, owner: Owner) -> int:
        """Return what ``owner`` holds here, from the ledger."""
        return self._cache.ledger.usage(owner, Tier.HBM).tokens

    def find(self, owner: Owner, text: "array[int]") -> int:
        """Return how many units of ``text`` are here from its beginning on, and use them."""
        found = self._cache.match_prefix(MatchPrefixParams(key=RadixKey(text, frame(owner))))
        return int(found.device_prefix_len)

    def put(self, owner: Owner, text: "array[int]") -> bool:
        """Put ``text`` here; the next victims make room. False where too little may go."""
        return self._put(owner, text) is not None

    def hold(self, owner: Owner, text: "array[int]") -> Held | None:
        """Put ``text`` here and keep it; None, and nothing changed, where too little may go."""
        put = self._put(owner, text)
        if put is None:
            return None
        present, last = put
        cache, lock = self._cache, self._cache.inc_lock_ref(last).to_dec_params()

        def release() -> None:
            cache.dec_lock_ref(last, lock)

        return Held(present, release)

    def _put(self, owner: Owner, text: "array[int]") -> tuple[int, Any] | None:
        """Add what is missing of ``text``; return how much was there, and the last node."""
        key = RadixKey(text, frame(owner))
        if len(text) <= self._pool.available_size() and not self._has_hard_quota(owner):
            return self._insert(key)
        found = self._cache.match_prefix(MatchPrefixParams(key=key))
        missing = len(text) - found.device_prefix_len
        if missing and not self._make_room(owner, missing, found.last_device_node):
            return None
        return self._insert(key)

    def _insert(self, key: RadixKey) -> tuple[int, Any]:
        count = len(key)
        # All of it counts as found before, so that the tree gives no slot back: the pool lends
        # them once it is known how many were missing.
        params = InsertParams(key=key, value=_Slots(count), prev_prefix_len=count)
        added = self._cache.insert(params)
        self._pool.alloc(count - added.prefix_len)
        return added.prefix_len, added.last_device_node

    def _has_hard_quota(self, owner: Owner) -> bool:
        return self._limited and self._cache.limits(owner).hard

    def _make_room(self, owner: Owner, missing: int, node: Any) -> bool:
        """Free what is missing, and some more at once, but nothing of the path to ``node``."""
        cache, lacking = self._cache, missing - self._pool.available_size()
        if lacking <= 0 and not self._limited:
            return True
        lock = cache.inc_lock_ref(node).to_dec_params()
        with cache.as_requester([owner], {owner: missing} if self._limited else None):
            if missing > self._pool.available_size():
                ahead = self._pool.size // _AHEAD
                cache.evict(EvictParams(num_tokens=max(lacking, ahead)))
        cache.dec_lock_ref(node, lock)
        if self._limited:
            # What is inserted now counts as the tree's from here on.
            cache.ledger.stop_running(owner, missing)
        return self._pool.available_size() >= missing


def _make_cache(pool: _Pool) -> TenantRadixCache:
    register_backend()
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=pool,
        page_size=1,
        tree_components=(ComponentType.FULL,),
        tree_core_backend=BACKEND,
    )
    params.component_registry_override = {ComponentType.FULL: TenantFullComponent}
    return TenantRadixCache(params)


def _in_units(book: QuotaBook, unit_tokens: int) -> Any:
    """Return the book with all sizes in units; a tier's own tree is all "HBM" to itself."""

    def in_units(limits: OwnerLimits) -> OwnerLimits:
        quota = None if limits.quota is None else limits.quota // unit_tokens
        return replace(limits, quota=quota, reserve=limits.reserve // unit_tokens)

    owners = {owner: in_units(limits) for owner, limits in book.owners.items()}
    return SimpleNamespace(
        tier=Tier.HBM,
        owners=owners,
        limits=lambda owner: owners.get(owner) or in_units(book.limits(owner)),
        capacity=book.capacity // unit_tokens,
        reserved=sum(limits.reserve for limits in owners.values()),
    )

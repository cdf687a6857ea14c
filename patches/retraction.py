"""Hook on SGLang's choice of the requests that lose their KV when decoding runs out of memory."""

from collections.abc import Callable
from typing import Any

from sglang_ext.patches.hooks import Hook
from sglang_ext.patches.scheduling import TenantScheduling
from sglang_ext.tenancy.retraction import retraction_order
from sglang_ext.types import Tier

__all__ = ["retraction_hooks"]

_TARGET = "sglang.srt.managers.schedule_batch.ScheduleBatch._get_decode_retraction_order"


def retraction_hooks(scheduling: TenantScheduling) -> list[Hook]:
    """Return the hook that takes from owners above their share, in SGLang's order inside each."""

    def get_decode_retraction_order(original: Callable[..., list[int]], reqs: Any) -> list[int]:
        kept_first = original(reqs)
        cache = scheduling.cache
        requests = [
            (scheduling.ticket(reqs[index]).owner, _freed(reqs[index])) for index in kept_first
        ]
        fixed = {owner: _fixed(cache, owner) for owner, _ in requests}
        capacity = cache.token_to_kv_pool_allocator.size
        gone_first = retraction_order(requests, fixed, cache.limits, capacity)
        return [kept_first[place] for place in reversed(gone_first)]

    return [Hook(_TARGET, get_decode_retraction_order, ("reqs",))]


def _freed(req: Any) -> int:
    return int(req.kv.kv_allocated_len - req.kv.cache_protected_len)


def _fixed(cache: Any, owner: Any) -> int:
    usage = cache.ledger.usage(owner, Tier.HBM)
    return int(usage.protected + usage.running)

"""What metrics read of a cache, without the cache."""

from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

from sglang_ext.radix.ledger import Ledger
from sglang_ext.tiering.token_time import TokenTime

__all__ = ["a_cache"]


def a_cache(**changes: Any) -> SimpleNamespace:
    """Return what the metrics read of a cache that has not done anything yet."""
    ledger = Ledger(bytes_per_token=10)
    cache = SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(size=20),
        host_pool_group=SimpleNamespace(size=40),
        ledger=ledger,
        tp_world_size=2,
        clock=SimpleNamespace(now_ms=0),
        token_time=TokenTime(),
        moved_bytes=Counter(),
        moved_seconds=Counter(),
        fetched=Counter(),
        choices=Counter(),
        ready_seconds=deque(),
        evictions={},
        store=None,
    )
    vars(cache).update(changes)
    return cache

"""The hook that measures how long prefills take: one side of "load or recompute"."""

import time
from collections.abc import Callable
from typing import Any

from sglang_ext.patches.hooks import Hook

__all__ = ["prefill_rate_hooks"]

_TARGET = "sglang.srt.managers.scheduler.Scheduler.process_batch_result"


def prefill_rate_hooks() -> list[Hook]:
    """Return the hook on the end of a batch."""
    ended = 0.0

    def process_batch_result(
        original: Callable[..., None], scheduler: Any, batch: Any, result: Any
    ) -> None:
        nonlocal ended
        original(scheduler, batch, result)
        # The batch before may have run on when this one was launched.
        began, ended = max(batch.launch_ts or 0.0, ended), time.monotonic()
        tokens = _computed(batch)
        if tokens:
            scheduler.tree_cache.worth.computed(tokens, ended - began)

    return [Hook(_TARGET, process_batch_result, ("self", "batch", "result"))]


def _computed(batch: Any) -> int:
    """Return the prompt tokens that a batch computed; 0 where loading took part of its time."""
    if not batch.forward_mode.is_extend() or batch.extend_lens is None or not batch.launch_ts:
        return 0
    if any(req.host_loaded_length for req in batch.reqs):
        return 0
    return int(sum(batch.extend_lens))

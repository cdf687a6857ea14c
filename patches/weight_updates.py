"""The hook on what ends every update of the weights: pages of the former ones lie on disk too."""

from collections.abc import Callable
from typing import Any

from sglang_ext.patches.hooks import Hook

__all__ = ["weight_update_hooks"]

_TARGET = (
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    ".flush_cache_after_weight_update"
)


def weight_update_hooks() -> list[Hook]:
    """Return the hook that tells the scheduler's cache, after SGLang's own flush."""
    return [Hook(_TARGET, _flush, ("self", "recv_req", "success", "message"))]


def _flush(
    original: Callable[..., tuple[bool, str]],
    manager: Any,
    recv_req: Any,
    success: bool,
    message: str,
) -> tuple[bool, str]:
    done, text = original(manager, recv_req, success, message)
    manager.scheduler.tree_cache.weights_changed(flushed=done and recv_req.flush_cache)
    return done, text

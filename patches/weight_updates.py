"""Hooks on updates of the weights: nothing that former weights computed may be served.

An update from disk that could not flush the cache is refused before it changes anything; SGLang
would change the weights first and report the failed flush afterwards. The other kinds come in many
parts, of which only the last one flushes; what each part means for the disk, the cache is told.
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqOutput

from sglang_ext.patches.hooks import Hook

__all__ = ["weight_update_hooks"]

_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_NO_FLUSH = "flush_cache is false: pages of the former weights would be served; leave it out"
_BUSY = (
    "requests are still running or queued, so that the cache cannot be flushed; "
    "finish or abort them, then update again"
)


def weight_update_hooks() -> list[Hook]:
    """Return the hooks before an update from disk, and after SGLang's flush for any update."""
    return [
        Hook(f"{_MANAGER}.update_weights_from_disk", _from_disk, ("self", "recv_req")),
        Hook(
            f"{_MANAGER}.flush_cache_after_weight_update",
            _flush,
            ("self", "recv_req", "success", "message"),
        ),
    ]


def _from_disk(original: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
    idle = manager.is_fully_idle(ignore_waiting=manager.scheduler._engine_paused)
    if recv_req.flush_cache and idle:
        return original(manager, recv_req)
    message = f"Weights were not updated: {_BUSY if recv_req.flush_cache else _NO_FLUSH}."
    return UpdateWeightFromDiskReqOutput(success=False, message=message, num_paused_requests=0)


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

"""What this process records beside its metrics: usage for bills, and the last requests.

``launch_server`` names the usage file in an environment variable, which the schedulers inherit.
"""

import functools
import os
from multiprocessing import util
from pathlib import Path
from typing import Any

from sglang_ext import active
from sglang_ext.observe.catalog import make
from sglang_ext.observe.recent import RecentRequests
from sglang_ext.observe.usage import HeldUsage, UsageRecorder
from sglang_ext.observe.usage_store import UsageStore

__all__ = [
    "USAGE_VARIABLE",
    "close",
    "hand_over",
    "held_usage",
    "recent",
    "record_requests",
    "usage",
]

USAGE_VARIABLE = "SGLANG_EXT_USAGE"
"""Path of the usage file; absent: usage is not kept."""


def hand_over(path: Path | None) -> None:
    """Let every process of this server write usage to ``path``, None for nowhere.

    Raises UsageError where that cannot be.
    """
    os.environ.pop(USAGE_VARIABLE, None)
    if path is not None:
        UsageStore(path).close()
        os.environ[USAGE_VARIABLE] = str(path.resolve())


@functools.cache
def usage() -> UsageRecorder | None:
    """Return the one recorder of this process, writing from the first call on; None: not kept."""
    path = os.environ.get(USAGE_VARIABLE)
    if path is None:
        return None
    recorder = UsageRecorder(UsageStore(Path(path)), on_error=lambda: _write_errors().inc())
    recorder.start()
    return recorder


@functools.cache
def _write_errors() -> Any:
    return make("usage_write_errors_total")


def held_usage() -> HeldUsage | None:
    """Return what takes in token-seconds in a scheduler, once; None: usage is not kept."""
    recorder = usage()
    if recorder is None:
        return None
    # At 0, so that an alert sees the first error.
    _write_errors()
    # A child of multiprocessing runs no atexit functions.
    util.Finalize(None, recorder.close, exitpriority=0)
    return HeldUsage(recorder)


@functools.cache
def recent() -> RecentRequests:
    """Return the last requests of this process."""
    return RecentRequests(lambda: active.request_metrics().page_size)


def record_requests(page_size: int) -> None:
    """Let finished requests reach everything here; once, in the process that serves HTTP."""
    metrics = active.request_metrics()
    metrics.page_size = page_size
    recorder = usage()
    metrics.observers += [recent()] if recorder is None else [recent(), recorder]


def close() -> None:
    """Write what is left, where this process keeps usage; may be called again."""
    recorder = usage() if usage.cache_info().currsize else None
    if recorder is not None:
        recorder.close()

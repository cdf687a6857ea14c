"""Hooks that put a deadline on shutdown.

SGLang drains running requests for as long as they take, and uvicorn waits for open streams. An
operator who stops the server, or a supervisor that restarts it, needs it gone.
"""

import os
import threading
from collections.abc import Callable
from typing import Any

from sglang.srt.utils import kill_process_tree

from sglang_ext.patches.hooks import Hook

__all__ = ["GRACE_SECONDS", "before_end", "shutdown_hooks"]

GRACE_SECONDS = 6.0
"""How long running requests may still take after SIGTERM or Ctrl-C."""

before_end: list[Callable[[], None]] = []
"""Called when the deadline ends this process, which runs nothing else then."""

_deadline_set = threading.Lock()


def shutdown_hooks() -> list[Hook]:
    """Return the hooks on the two signal handlers of the main process."""
    sglang = "sglang.srt.managers.tokenizer_manager.SignalHandler.sigterm_handler"
    return [
        Hook(sglang, _with_deadline, ("self", "signum", "frame")),
        Hook("uvicorn.Server.handle_exit", _with_deadline, ("self", "sig", "frame")),
    ]


def _with_deadline(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    if _deadline_set.acquire(blocking=False):
        timer = threading.Timer(GRACE_SECONDS, _end)
        timer.daemon = True
        timer.start()
    original(*args, **kwargs)


def _end() -> None:
    """End every child and this process; requests still running are cut off."""
    kill_process_tree(os.getpid(), include_parent=False)
    try:
        for save in before_end:
            save()
    finally:
        os._exit(1)

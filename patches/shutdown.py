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

__all__ = ["GRACE_SECONDS", "shutdown_hooks"]

GRACE_SECONDS = 7.0
"""How long running requests may still take after SIGTERM or Ctrl-C."""

_deadline_lock = threading.Lock()


def shutdown_hooks() -> list[Hook]:
    """Return the hooks on the two signal handlers of the main process."""
    sglang = "sglang.srt.managers.tokenizer_manager.SignalHandler.sigterm_handler"
    return [
        Hook(sglang, _with_deadline, ("self", "signum", "frame")),
        Hook("uvicorn.Server.handle_exit", _with_deadline, ("self", "sig", "frame")),
    ]


def _with_deadline(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    if _deadline_lock.acquire(blocking=False):
        timer = threading.Timer(GRACE_SECONDS, kill_process_tree, args=(os.getpid(),))
        timer.daemon = True
        timer.start()
    original(*args, **kwargs)

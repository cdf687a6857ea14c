"""Hook where SGLang turns a refusal by the scheduler into an answer: keeps its status."""

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from sglang_ext.patches.hooks import Hook
from sglang_ext.tenancy.refused import note_refusal

__all__ = ["refusal_status_hooks"]

_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_TARGET = f"{_MANAGER}._handle_abort_finish_reason"


def refusal_status_hooks() -> list[Hook]:
    """Return the hook in the process that serves HTTP."""
    return [Hook(_TARGET, _handle_abort_finish_reason, ("self", "out", "state", "is_stream"))]


async def _handle_abort_finish_reason(
    original: Callable[..., Awaitable[Any]], manager: Any, out: Any, state: Any, is_stream: bool
) -> Any:
    reason = out["meta_info"]["finish_reason"]
    status = reason.get("status_code")
    if reason.get("type") == "abort" and status is not None and 400 <= status < 600:
        note_refusal(int(status), reason.pop("retry_after", 0))
        # SGLang's streams tell an error by this type, which a number has lost between processes.
        reason["status_code"] = HTTPStatus(status)
    return await original(manager, out, state, is_stream)

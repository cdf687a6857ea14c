"""Who changed what, as JSON lines: no prompts and no keys.

The file is opened for each line, so that it can be rotated at any time by renaming it. A line that
cannot be written is logged and counted, and never keeps the server from its work.
"""

import json
import logging
import os
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from fastapi import HTTPException, Request
from pydantic import BaseModel

from sglang_ext.tenancy.identity import Identity, current_identity

__all__ = ["AuditLog", "Refusal", "Refused", "audited", "who"]

logger = logging.getLogger(__name__)

_LONGEST_PATH = 300


class AuditLog:
    """Appends to the file at ``path``; None: to the server's own log."""

    def __init__(self, path: Path | None, on_failure: Callable[[], None] = lambda: None) -> None:
        """``on_failure`` is called for each line that was lost, for a counter."""
        self._path = path
        self._on_failure = on_failure

    def write(self, by: str, action: str, outcome: str, **details: Any) -> None:
        """Add one line. ``by``: a key's fingerprint, ``tenant:<name>`` or SIGHUP."""
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        row = {"time": time, "by": by, "action": action, "outcome": outcome, **details}
        line = json.dumps(row, ensure_ascii=True, default=str)
        if self._path is None:
            logger.info("audit: %s", line)
            return
        try:
            _append(self._path, line)
        except OSError as error:
            logger.warning("audit log: %s; the line was: %s", error, line)
            self._on_failure()


def _append(path: Path, line: str) -> None:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o640)
    try:
        # One write: lines of two processes do not mix, and a reader sees whole lines.
        os.write(descriptor, line.encode("ascii") + b"\n")
    finally:
        os.close(descriptor)


def who(identity: Identity) -> str:
    """Return the name of a caller in the log: an admin by its key, a tenant by its name."""
    return f"tenant:{identity.tenant}" if identity.id_prefix else identity.key


class Refusal(BaseModel):
    """Why nothing was done, in the form of SGLang's own routes."""

    object: Literal["error"]
    message: str
    type: str
    param: str | None
    code: int


class Unreadable(BaseModel):
    """What FastAPI says of a body that is no text at all."""

    detail: str


Refused = Refusal | Unreadable
"""What 400 holds."""


async def audited(request: Request) -> AsyncIterator[None]:
    """FastAPI dependency of our routes: whatever is more than a question goes into the log."""
    action = f"{request.method} {request.url.path[:_LONGEST_PATH]}"
    log: AuditLog = request.app.state.audit_log
    by = who(current_identity.get())
    try:
        yield
    except HTTPException as error:
        _note(log, request, by, action, f"refused: {error.status_code}")
        raise
    except Exception:
        _note(log, request, by, action, "failed")
        raise
    _note(log, request, by, action, "done")


def _note(log: AuditLog, request: Request, by: str, action: str, outcome: str) -> None:
    if request.method not in {"GET", "HEAD", "OPTIONS"}:
        log.write(by, action, outcome, **getattr(request.state, "audit", {}))

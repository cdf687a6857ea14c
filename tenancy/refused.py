"""HTTP status and Retry-After of a request that the scheduler refused.

SGLang has promised 200 by the time a streamed request reaches the scheduler. So the first line of a
stream is held back until its first event is there; a refusal that came meanwhile replaces it.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

__all__ = ["note_refusal", "serve"]

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(slots=True)
class _Refused:
    """Shared by all tasks of one HTTP request, whose contexts are copies of one another."""

    status: int | None = None
    retry_after: int = 0


_refused: ContextVar[_Refused | None] = ContextVar("refused", default=None)


def note_refusal(status: int, retry_after: int = 0) -> None:
    """Note that the HTTP request in whose context this runs was refused, whatever its route says.

    ``retry_after`` in seconds, 0: do not say. Without an HTTP request nothing happens.
    """
    refused = _refused.get()
    if refused is not None:
        refused.status, refused.retry_after = status, retry_after


async def serve(app: App, scope: Scope, receive: Receive, send: Send) -> None:
    """Call ``app``; a refusal noted before the first body changes status and headers."""
    refused = _Refused()
    token = _refused.set(refused)
    try:
        await app(scope, receive, _Holding(send, refused))
    finally:
        _refused.reset(token)


class _Holding:
    """Sends the start of a response with its first body."""

    def __init__(self, send: Send, refused: _Refused) -> None:
        self._send = send
        self._refused = refused
        self._start: Message | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        if self._start is not None:
            start, self._start = self._start, None
            await self._send(self._corrected(start))
        await self._send(message)

    def _corrected(self, start: Message) -> Message:
        refused = self._refused
        if refused.status is None:
            return start
        headers = list(start.get("headers", ()))
        if refused.retry_after:
            headers.append((b"retry-after", b"%d" % refused.retry_after))
        status = refused.status if start["status"] == 200 else start["status"]
        return {**start, "status": status, "headers": headers}

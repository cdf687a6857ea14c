"""Reads a request before it is known who will answer it, and hands it on as if nobody had."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

__all__ = ["Early"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]


class Early:
    """The messages of one request. ``receive`` gives those that were read, then those to come."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._read: list[Message] = []

    async def begin(self) -> None:
        """Wait for the first part."""
        self._read.append(await self._receive())

    async def body(self, most_bytes: int) -> bytes | None:
        """Return the whole body, or None where it is longer or the client goes away.

        Reads no more of a longer one than shows that it is. Call ``begin`` before.
        """
        while self._read[-1].get("more_body", False) and self._size() <= most_bytes:
            await self.begin()
        whole = self._read[-1]["type"] == "http.request" and self._size() <= most_bytes
        return b"".join(part.get("body", b"") for part in self._read) if whole else None

    async def receive(self) -> Message:
        """Return the next message, as an ASGI server would."""
        return self._read.pop(0) if self._read else await self._receive()

    def _size(self) -> int:
        return sum(len(part.get("body", b"")) for part in self._read)

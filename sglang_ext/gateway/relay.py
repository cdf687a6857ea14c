"""Sends a request to an engine and its answer back, as it comes: nothing is buffered or changed.

Headers that belong to a connection stay on it; the client's address and the gateway's secret are
added. A client that goes away takes its request with it. Where an engine cannot be reached, nothing
was sent, and the next one is asked; in every other case a request is sent once.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from sglang_ext.gateway.place import SECRET_HEADER
from sglang_ext.gateway.supervisor import Engine
from sglang_ext.tenancy.refusals import refusal_body
from sglang_ext.tenancy.routes import dialect_of

__all__ = ["Failure", "Receive", "Relay", "Send", "new_session", "request_target"]

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_CONNECT_S = 2.0
# Below the 5 s after which an engine closes a connection that nobody uses.
_KEEP_S = 3.0
_READ_BYTES = 2**18
_RETRY_AFTER_S = 5

_HOP_BY_HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding"),
        *("upgrade", "proxy-authenticate", "proxy-authorization"),
    }
)
_NOT_SENT = _HOP_BY_HOP | {"content-length", "expect", "x-forwarded-for"}
_NOT_SENT |= {"forwarded", "x-forwarded-proto", SECRET_HEADER.decode()}
# The gateway's own server writes these two.
_NOT_RETURNED = _HOP_BY_HOP | {"date", "server"}

_NO_ENGINE = "The engine that serves this tenant is not running now; try again shortly."
_BROKEN = "The engine ended while it worked on this request; it may be sent again."


class Failure(StrEnum):
    """Why a request got no answer of an engine."""

    UNREACHABLE = "unreachable"
    BROKEN = "broken"


class _BrokenError(aiohttp.ClientError):
    """The engine closed the connection after the request was sent."""


class _GoneError(Exception):
    """The client closed its connection before its request was complete."""


class _Sent(NamedTuple):
    """The request as the engine gets it."""

    method: str
    target: str
    headers: CIMultiDict[str]


def new_session() -> aiohttp.ClientSession:
    """Return connections to engines, kept open between requests; close it in the end."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        read_bufsize=_READ_BYTES,
        max_line_size=2**16,
        max_field_size=2**16,
        middlewares=(_once,),
    )


async def _once(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """Keep aiohttp from sending a request again that may have reached an engine."""
    try:
        return await handler(request)
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
        raise
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        raise _BrokenError(str(error) or "the connection was closed") from error


class Relay:
    """Relays to engines. ``on_failure`` is called with the engine's name, for a counter."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        secret: str,
        on_failure: Callable[[str, Failure], None] = lambda engine, failure: None,
    ) -> None:
        self._session = session
        self._secret = secret
        self._on_failure = on_failure
        self.in_flight: dict[str, int] = {}

    async def __call__(
        self,
        engines: Sequence[Engine],
        scope: Message,
        receive: Receive,
        send: Send,
        on_sent: Callable[[str], None] = lambda engine: None,
    ) -> None:
        """Let the first of ``engines`` that can be reached answer; 503 where none can.

        ``on_sent`` is called with the name of each that is tried.
        """
        body = _Body(receive)
        work = asyncio.ensure_future(self._serve(engines, scope, body, send, on_sent))
        gone = asyncio.ensure_future(body.until_client_is_gone())
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            work.cancel()
            await asyncio.wait({work, gone})
        if work.done() and not work.cancelled():
            work.result()

    async def _serve(
        self,
        engines: Sequence[Engine],
        scope: Message,
        body: "_Body",
        send: Send,
        on_sent: Callable[[str], None],
    ) -> None:
        try:
            await body.begin()
            sent = _Sent(scope["method"], request_target(scope), _to_engine(scope, self._secret))
            for engine in (one for one in engines if one.is_ready):
                on_sent(engine.spec.name)
                if await self._ask(engine, sent, body, scope, send):
                    return
        except _GoneError:
            return
        await _refuse(scope, send, 503, _NO_ENGINE)

    async def _ask(
        self, engine: Engine, sent: _Sent, body: "_Body", scope: Message, send: Send
    ) -> bool:
        """Return False where nothing was sent, so that another engine may be asked."""
        name = engine.spec.name
        self.in_flight[name] = self.in_flight.get(name, 0) + 1
        try:
            async with self._session.request(
                sent.method,
                URL(engine.url + sent.target, encoded=True),
                headers=sent.headers,
                data=body.data(),
                allow_redirects=False,
            ) as answer:
                await self._answer(name, answer, scope, send)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            # Before a connection is there, nothing of the body is asked for.
            self._on_failure(name, Failure.UNREACHABLE)
            return False
        except aiohttp.ClientError as error:
            if body.client_is_gone:
                raise _GoneError from None
            logger.warning("engine %s: %s: %s", name, type(error).__name__, error)
            self._on_failure(name, Failure.BROKEN)
            await _refuse(scope, send, 502, _BROKEN)
        finally:
            self.in_flight[name] -= 1
        return True

    async def _answer(
        self, name: str, answer: aiohttp.ClientResponse, scope: Message, send: Send
    ) -> None:
        """Send the answer on. Raises ClientError before anything was sent, never afterwards."""
        # An engine that ends before its first byte can still be told to the client.
        first = await answer.content.readany()
        headers = _to_client(answer.raw_headers)
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        try:
            chunk = first
            while chunk:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                chunk = await answer.content.readany()
        except aiohttp.ClientError as error:
            # Left incomplete, so that the server cuts the connection and the client knows.
            logger.warning("engine %s: cut off: %s", name, error)
            self._on_failure(name, Failure.BROKEN)
            return
        await send({"type": "http.response.body", "body": b""})


class _Body:
    """The body of a request, read as the engine takes it."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._first: bytes | None = None
        self._complete = asyncio.Event()
        self.client_is_gone = False

    async def begin(self) -> None:
        """Wait for the first part."""
        self._first = await self._next()

    def data(self) -> bytes | AsyncIterator[bytes] | None:
        """Return what to send: the whole, where it came in one part."""
        return self._parts() if not self._complete.is_set() else (self._first or None)

    async def until_client_is_gone(self) -> None:
        """Return once the client has closed the connection."""
        await self._complete.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _parts(self) -> AsyncIterator[bytes]:
        if self._first:
            yield self._first
        while not self._complete.is_set():
            part = await self._next()
            if part:
                yield part

    async def _next(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.client_is_gone = True
            raise _GoneError
        if not message.get("more_body", False):
            self._complete.set()
        return bytes(message.get("body", b""))


def request_target(scope: Message) -> str:
    """Return path and query as the client wrote them."""
    path: bytes = scope.get("raw_path") or scope["path"].encode("utf-8")
    query: bytes = scope.get("query_string", b"")
    return (path + b"?" + query if query else path).decode("latin-1")


def _to_engine(scope: Message, secret: str) -> CIMultiDict[str]:
    listed = _named_by_connection(scope["headers"])
    headers = CIMultiDict(
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in scope["headers"]
        if name.decode("latin-1") not in _NOT_SENT | listed
    )
    headers["x-forwarded-for"] = (scope.get("client") or ("",))[0]
    headers[SECRET_HEADER.decode()] = secret
    return headers


def _to_client(raw: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    lower = [(name.lower(), value) for name, value in raw]
    dropped = _NOT_RETURNED | _named_by_connection(lower)
    return [(name, value) for name, value in lower if name.decode("latin-1") not in dropped]


def _named_by_connection(headers: Iterable[tuple[bytes, bytes]]) -> set[str]:
    """Return the headers that a Connection header says are for this connection only."""
    values = [value.decode("latin-1") for name, value in headers if name == b"connection"]
    return {word.strip().lower() for value in values for word in value.split(",")}


async def _refuse(scope: Message, send: Send, status: int, message: str) -> None:
    body = refusal_body(dialect_of(scope["path"]), status, message)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if status == 503:
        headers.append((b"retry-after", b"%d" % _RETRY_AFTER_S))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

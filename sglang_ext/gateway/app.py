"""The gateway as an ASGI application: some questions it answers itself, all else an engine does."""

import secrets
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from sglang_ext.errors import ServerError
from sglang_ext.gateway.early import Early
from sglang_ext.gateway.fan_out import FanOut
from sglang_ext.gateway.prefix_index import PrefixIndex
from sglang_ext.gateway.prompt import BLOCK_BYTES, MOST_BYTES, PROMPTED, chain_of
from sglang_ext.gateway.relay import Receive, Relay, Send
from sglang_ext.gateway.routing import Routing
from sglang_ext.gateway.supervisor import Engine
from sglang_ext.gateway.targets import Target, is_own, target_of
from sglang_ext.tenancy.auth import App
from sglang_ext.tenancy.identity import current_identity
from sglang_ext.tenancy.refusals import refusal_body
from sglang_ext.tenancy.routes import dialect_of

__all__ = ["Gateway"]

Scope = MutableMapping[str, Any]

_TRY_AGAIN_LATER = 1013
_NONE = "No engine is running now; try again shortly."
_NO_SOCKETS = "WebSockets do not go through the gateway; they need a server with one engine."


class Gateway:
    """Finds the engine of each request. Stands behind ``TenantAuth``, which says whose it is."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        routing: Routing,
        relay: Relay,
        fan_out: FanOut,
        own: App,
        index: PrefixIndex,
    ) -> None:
        """``own``: the application with the gateway's own routes; ``index``: what was sent."""
        self._engines = engines
        self._routing = routing
        self._relay = relay
        self._fan_out = fan_out
        self._own = own
        self._index = index
        self._key = secrets.token_bytes(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _TRY_AGAIN_LATER, "reason": _NO_SOCKETS})
        elif scope["type"] != "http" or is_own(scope["path"]):
            await self._own(scope, receive, send)
        else:
            await self._pass_on(scope, receive, send)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        target = target_of(
            scope["method"],
            scope["path"],
            scope["query_string"],
            dict(scope["headers"]),
            current_identity.get(),
        )
        names = ", ".join(self._engines)
        if target.changes_one and len(self._engines) > 1:
            message = f"This changes one engine of several: name it in X-Engine ({names})."
            await _refuse(scope, send, 400, message)
        elif target.engine is not None and target.engine not in self._engines:
            await _refuse(scope, send, 400, f"X-Engine: expected one of {names}.")
        elif target.every and len(self._all(target)) > 1:
            await self._ask_all(_asked(self._all(target), scope), scope, receive, send)
        else:
            await self._ask_one(target, scope, receive, send)

    def _all(self, target: Target) -> Sequence[Engine]:
        routing = self._routing
        names = routing.names if target.tenant is None else routing.engines_of(target.tenant)
        return [self._engines[name] for name in names]

    async def _ask_one(self, target: Target, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the best engine answer, chosen when the request is there and not before."""
        early = Early(receive)
        await early.begin()
        chain = await self._chain(target, scope, early)
        owner = current_identity.get().owner
        await self._relay(
            self._best_first(target, chain),
            *(scope, early.receive, send),
            on_sent=lambda engine: self._index.learn(owner, chain, engine),
        )

    async def _chain(self, target: Target, scope: Scope, early: Early) -> Sequence[bytes]:
        """Return the blocks of a request's text where it matters who has them."""
        several = target.tenant is not None and len(self._routing.engines_of(target.tenant)) > 1
        if not several or scope["method"] != "POST" or scope["path"] not in PROMPTED:
            return ()
        body = await early.body(MOST_BYTES)
        return chain_of(current_identity.get(), body, self._key) if body else ()

    def _best_first(self, target: Target, chain: Sequence[bytes]) -> Sequence[Engine]:
        if target.engine is not None:
            return [self._engines[target.engine]]
        routing, tenant = self._routing, target.tenant
        if tenant is None:
            # What belongs to nobody is the first one's.
            return self._in_service(routing.names)[:1]
        blocks = self._index.matched(current_identity.get().owner, chain, routing.names)
        warm = {name: count * BLOCK_BYTES for name, count in blocks.items()}
        in_flight = self._relay.in_flight
        return self._in_service(routing.order(tenant, target.session, in_flight, warm))

    def _in_service(self, names: Sequence[str]) -> list[Engine]:
        engines = (self._engines[name] for name in names)
        return [engine for engine in engines if engine.drain is None]

    async def _ask_all(
        self, engines: Sequence[Engine], scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            if not engines:
                raise ServerError(_NONE)
            answer = await self._fan_out.relay(engines, scope, receive)
        except ServerError as error:
            await _refuse(scope, send, 503, str(error))
            return
        await _send(send, answer.status, answer.body, answer.content_type)


def _asked(engines: Sequence[Engine], scope: Scope) -> Sequence[Engine]:
    """Return who answers together: all, but no engine that is off and has nothing to say.

    That is one out of service, and a node, which may be off for long, where nothing is changed
    that it would have to know of when it is back.
    """
    asks = scope["method"] in {"GET", "HEAD"} or scope["path"] == "/abort_request"
    return [
        engine
        for engine in engines
        if engine.is_ready or not (engine.drain is not None or (asks and engine.spec.url))
    ]


async def _refuse(scope: Scope, send: Send, status: int, message: str) -> None:
    body = refusal_body(dialect_of(scope["path"]), status, message)
    await _send(send, status, body, "application/json")


async def _send(send: Send, status: int, body: bytes, content_type: str) -> None:
    headers = [
        (b"content-type", content_type.encode("latin-1")),
        (b"content-length", b"%d" % len(body)),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

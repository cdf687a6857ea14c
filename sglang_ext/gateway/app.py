"""The gateway as an ASGI application: some questions it answers itself, all else an engine does."""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from sglang_ext.errors import ServerError
from sglang_ext.gateway.fan_out import FanOut
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
    ) -> None:
        """``own``: the application with the gateway's own routes."""
        self._engines = engines
        self._routing = routing
        self._relay = relay
        self._fan_out = fan_out
        self._own = own

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
        engines = self._found(target)
        if target.changes_one and len(self._engines) > 1:
            names = ", ".join(self._engines)
            message = f"This changes one engine of several: name it in X-Engine ({names})."
            await _refuse(scope, send, 400, message)
        elif not engines:
            names = ", ".join(self._engines)
            await _refuse(scope, send, 400, f"X-Engine: expected one of {names}.")
        elif target.every and len(engines) > 1:
            await self._ask_all(engines, scope, receive, send)
        else:
            await self._relay(engines, scope, receive, send)

    def _found(self, target: Target) -> Sequence[Engine]:
        """Return the engines of a target, best first."""
        routing = self._routing
        if target.engine is not None:
            names: Sequence[str] = [target.engine] if target.engine in self._engines else []
        elif target.tenant is None:
            names = routing.names if target.every else [routing.default]
        elif target.every:
            names = routing.engines_of(target.tenant)
        else:
            names = routing.order(target.tenant, target.session, self._relay.in_flight)
        return [self._engines[name] for name in names]

    async def _ask_all(
        self, engines: Sequence[Engine], scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            answer = await self._fan_out.relay(engines, scope, receive)
        except ServerError as error:
            await _refuse(scope, send, 503, str(error))
            return
        await _send(send, answer.status, answer.body, answer.content_type)


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

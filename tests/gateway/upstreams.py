"""Small engines and the gateway in front of them, all real servers on loopback in one loop."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn

from sglang_ext.audit_log import AuditLog
from sglang_ext.gateway.app import Gateway
from sglang_ext.gateway.draining import Drainer
from sglang_ext.gateway.fan_out import FanOut
from sglang_ext.gateway.life import Life, State
from sglang_ext.gateway.machine import free_ports
from sglang_ext.gateway.own_routes import own_app
from sglang_ext.gateway.plan import EngineSpec
from sglang_ext.gateway.prefix_index import PrefixIndex
from sglang_ext.gateway.relay import Failure, Relay, new_session
from sglang_ext.gateway.routing import Routing
from sglang_ext.gateway.supervisor import Engine
from sglang_ext.tenancy.auth import Callers, TenantAuth
from sglang_ext.tenancy.keys import digest
from sglang_ext.tenancy.loader import build_policy
from sglang_ext.types import TenantId

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]

SECRET = "the gateway's secret"
POLICY = {
    "version": 1,
    "admin_keys": [digest("key-admin")],
    "tenants": {
        "a": {"api_keys": [digest("key-a")]},
        "b": {"api_keys": [digest("key-b")]},
        "bank": {"api_keys": [digest("key-bank")], "isolation": "dedicated", "gpus": [0]},
    },
}


@asynccontextmanager
async def listening(app: App) -> AsyncIterator[str]:
    """Serve ``app`` until the block ends; connections that are left are cut."""
    # Our clients are on loopback, whose word a server takes for where a request comes from.
    config = uvicorn.Config(app, port=0, lifespan="off", log_level="critical", proxy_headers=False)
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    # Not ``serve``, which looks only every tenth of a second whether it shall end.
    await server.startup()
    await server.on_tick(0)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.force_exit = True
        await server.shutdown()


def engine(name: str, url: str, *, tenant: str | None = None, ready: bool = True) -> Engine:
    spec = EngineSpec(name, None if tenant is None else TenantId(tenant), 0, 1)
    return Engine(spec, url, Life(State.READY if ready else State.WAITING))


def dead_url() -> str:
    """Where nobody listens."""
    return f"http://127.0.0.1:{free_ports(1)[0]}"


class Front:
    """A running gateway, a client of it, and what it counted as failed."""

    def __init__(self, url: str, client: httpx.AsyncClient, failures: list[Any]) -> None:
        self.url = url
        self.client = client
        self.failures = failures

    async def send(
        self, method: str, path: str, key: str = "key-a", **request: Any
    ) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}", **request.pop("headers", {})}
        return await self.client.request(method, self.url + path, headers=headers, **request)


@asynccontextmanager
async def front(*engines: Engine) -> AsyncIterator[Front]:
    """Put a gateway before ``engines``."""
    failures: list[tuple[str, Failure]] = []
    async with new_session() as session:
        fan_out = FanOut(session, SECRET)
        routing = Routing(one.spec for one in engines)
        relay = Relay(session, SECRET, lambda *failure: failures.append(failure))
        index = PrefixIndex()
        drainer = Drainer(fan_out, relay.in_flight, lambda one: [TenantId("a")], lambda one: True)
        own = own_app(engines, routing, fan_out, drainer, index)
        own.state.audit_log = AuditLog(None)
        by_name = {one.spec.name: one for one in engines}
        gateway = Gateway(by_name, routing, relay, fan_out, own, index)
        app = TenantAuth(gateway, Callers(build_policy(POLICY)), lambda key: False)
        async with listening(app) as url, httpx.AsyncClient(timeout=10) as client:
            yield Front(url, client, failures)


class Echo:
    """Answers with what it got, and remembers it."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.seen: list[dict[str, Any]] = []

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        got = {
            "engine": self.name,
            "method": scope["method"],
            "path": scope["raw_path"].decode(),
            "query": scope["query_string"].decode(),
            "headers": {name.decode(): value.decode() for name, value in scope["headers"]},
            "bytes": len(body),
        }
        self.seen.append(got)
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [
                    (b"content-type", b"application/json"),
                    (b"x-twice", b"1"),
                    (b"x-twice", b"2"),
                    (b"connection", b"x-private"),
                    (b"x-private", b"1"),
                ],
            }
        )
        await send({"type": "http.response.body", "body": json.dumps(got).encode()})

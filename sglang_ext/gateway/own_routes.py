"""The gateway's own routes: health, engines, one page of metrics, and flush.

The policy's routes are those of every server (see ``policy_routes``); the gateway mounts them too.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from sglang_ext.errors import ServerError
from sglang_ext.gateway.draining import Drainer
from sglang_ext.gateway.engine_routes import engine_routes
from sglang_ext.gateway.fan_out import FanOut, passed_on, together
from sglang_ext.gateway.merge import merged_metrics
from sglang_ext.gateway.prefix_index import PrefixIndex
from sglang_ext.gateway.routing import Routing
from sglang_ext.gateway.supervisor import Engine
from sglang_ext.observe.catalog import PREFIX
from sglang_ext.tenancy.identity import Identity, current_identity
from sglang_ext.types import TenantId

__all__ = ["own_app"]

_GATEWAY = "gateway"
_SCRAPE_S = 5.0
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def own_app(
    engines: Sequence[Engine],
    routing: Routing,
    fan_out: FanOut,
    drainer: Drainer,
    index: PrefixIndex,
    note: Callable[[Engine], None] = lambda engine: None,
) -> FastAPI:
    """Return an application with these routes. ``note`` is called for each engine at a scrape."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(HTTPException, _refusal)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.include_router(_health_routes(engines))
    app.include_router(engine_routes(engines, drainer))
    app.include_router(_metrics_routes(engines, fan_out, note))
    app.include_router(_flush_routes(engines, routing, fan_out, index))
    return app


def _health_routes(engines: Sequence[Engine]) -> APIRouter:
    router = APIRouter()

    def state(needed: int) -> Response:
        """Say how many serve, and not which: the route needs no key."""
        ready = sum(engine.takes_requests for engine in engines)
        body = {"engines": len(engines), "ready": ready}
        return JSONResponse(body, status_code=200 if ready >= needed else 503)

    @router.get("/ready")
    async def ready() -> Response:
        """Whether every engine serves that was not taken out of service."""
        return state(sum(engine.drain is None for engine in engines))

    @router.get("/ping")
    @router.get("/health")
    @router.get("/health_generate")
    async def health() -> Response:
        """Whether any engine serves: one tenant's engine must not take the others' door away."""
        return state(1)

    return router


def _metrics_routes(
    engines: Sequence[Engine], fan_out: FanOut, note: Callable[[Engine], None]
) -> APIRouter:
    router = APIRouter()

    @router.get("/metrics")
    @router.get("/metrics/")
    async def metrics() -> Response:
        """Return the metrics of all engines that serve, each sample with its engine."""
        for engine in engines:
            note(engine)
        asked = (_metrics_of(engine, fan_out) for engine in engines if engine.is_ready)
        found = [page for page in await asyncio.gather(*asked) if page is not None]
        text = merged_metrics([(_GATEWAY, _own_metrics()), *found])
        return Response(text, media_type=_METRICS_TYPE)

    return router


def _flush_routes(
    engines: Sequence[Engine], routing: Routing, fan_out: FanOut, index: PrefixIndex
) -> APIRouter:
    router = APIRouter()
    by_name = {engine.spec.name: engine for engine in engines}

    @router.post("/ext/v1/flush")
    async def flush(body: dict[str, Any], request: Request) -> Response:
        """Flush where the tenant is served, or everywhere; a tenant's key only what is its own."""
        caller = current_identity.get()
        _forget(index, caller)
        tenant = caller.tenant if caller.id_prefix else body.get("tenant")
        named = isinstance(tenant, str)
        names = routing.engines_of(TenantId(str(tenant))) if named else routing.names
        found = [by_name[name] for name in names]
        down = [engine.spec.name for engine in found if not engine.is_ready]
        if down:
            raise HTTPException(503, f"engine {down[0]} is not running now; nothing was done")
        answers = await fan_out.all(
            found,
            *("POST", "/ext/v1/flush"),
            headers=passed_on(request.scope),
            body=json.dumps(body).encode(),
        )
        answer = together(answers)
        return Response(answer.body, answer.status, media_type=answer.content_type)

    return router


def _forget(index: PrefixIndex, caller: Identity) -> None:
    """Forget what was sent for who flushes; whatever comes of the flush, that costs warmth only."""
    if caller.id_prefix:
        index.forget_owner(caller.owner)
    else:
        index.clear()


async def _metrics_of(engine: Engine, fan_out: FanOut) -> tuple[str, str] | None:
    """Return an engine's name and page, or None where it ends just now or does not answer."""
    try:
        answer = await fan_out.ask(engine, "GET", "/metrics/", seconds=_SCRAPE_S)
    except ServerError:
        return None
    return (engine.spec.name, answer.body.decode("utf-8")) if answer.status == 200 else None


def _own_metrics() -> str:
    """Return what the gateway itself counts; not the process's, which Python adds."""
    from prometheus_client import generate_latest

    return generate_latest(_Ours()).decode("utf-8")


class _Ours:
    """Our own families among those of this process."""

    def collect(self) -> list[Any]:
        from prometheus_client import REGISTRY

        return [family for family in REGISTRY.collect() if family.name.startswith(PREFIX)]


def _refused(status: int, message: str) -> JSONResponse:
    """Return an error in the form of SGLang's own routes."""
    body = {"object": "error", "message": message, "type": str(status), "param": None}
    return JSONResponse({**body, "code": status}, status_code=status)


async def _refusal(_: Request, error: Any) -> JSONResponse:
    return _refused(error.status_code, str(error.detail))


async def _invalid(_: Request, error: Any) -> JSONResponse:
    return _refused(400, str(error))

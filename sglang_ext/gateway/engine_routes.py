"""The operator's routes about engines: which there are, out of service and back."""

from collections.abc import Sequence

from fastapi import APIRouter, Depends, HTTPException
from pydantic import BaseModel

from sglang_ext.audit_log import audited
from sglang_ext.gateway.draining import Drainer
from sglang_ext.gateway.supervisor import Engine

__all__ = ["engine_routes"]


class DrainRow(BaseModel):
    """How far it is to take an engine out of service, and of how many conversations."""

    state: str
    sessions: int
    moved: int
    note: str | None


class EngineRow(BaseModel):
    """One engine, as its supervisor sees it; ``requests``: how many it works on."""

    engine: str
    state: str
    pid: int | None
    restarts: int
    gpus: list[int]
    dedicated_to: str | None
    url: str | None
    problem: str | None
    drain: DrainRow | None
    requests: int


class EngineRows(BaseModel):
    """All engines behind the gateway."""

    engines: list[EngineRow]


def engine_routes(engines: Sequence[Engine], drainer: Drainer) -> APIRouter:
    """Return ``GET /ext/v1/engines``, and ``POST`` of ``{name}/drain`` and ``{name}/resume``."""
    router = APIRouter(prefix="/ext/v1/engines", dependencies=[Depends(audited)])
    by_name = {engine.spec.name: engine for engine in engines}

    def row(engine: Engine) -> EngineRow:
        return EngineRow(**engine.row(), requests=drainer.requests(engine))

    def found(name: str) -> Engine:
        engine = by_name.get(name)
        if engine is None:
            raise HTTPException(404, f"no such engine, expected one of {', '.join(by_name)}")
        return engine

    @router.get("")
    async def list_engines() -> EngineRows:
        """Return every engine with its state."""
        return EngineRows(engines=[row(engine) for engine in engines])

    @router.post("/{name}/drain")
    async def drain(name: str) -> EngineRow:
        """Begin; the list shows when it is drained. 409 where nobody else serves its tenants."""
        engine = found(name)
        if not _others(engine, engines):
            message = f"no other engine serves the tenants of {name} now; nothing was changed"
            raise HTTPException(409, message)
        drainer.drain(engine)
        return row(engine)

    @router.post("/{name}/resume")
    async def resume(name: str) -> EngineRow:
        """Let it serve again."""
        drainer.resume(found(name))
        return row(found(name))

    return router


def _others(engine: Engine, engines: Sequence[Engine]) -> list[Engine]:
    """Return the engines that take over what this one serves."""
    if engine.spec.tenant is not None:
        return []
    others = (one for one in engines if one is not engine and one.spec.tenant is None)
    return [one for one in others if one.takes_requests]

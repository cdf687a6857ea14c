"""Takes an engine out of service: nothing new goes there, what runs ends, conversations move.

A conversation moves by way of the tiers below: pausing it waits until the disk has all of it, and
what the disk gets the remote store gets too. Without a remote tier it stays where it is, and its
next turn is computed again elsewhere.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import quote

from sglang_ext.errors import ServerError
from sglang_ext.gateway.fan_out import FanOut
from sglang_ext.gateway.life import Drain, DrainState
from sglang_ext.gateway.supervisor import Engine
from sglang_ext.types import TenantId, Tier

__all__ = ["Drainer"]

logger = logging.getLogger(__name__)

_LOOK_S = 0.1
_AT_ONCE = 8
_PAGE = 1000
_STORE_S = 2.0
"""The store's copy follows the disk's; it has so long at most (``remote_store``)."""


class Drainer:
    """Drains engines, each on its own.

    ``in_flight``: requests that each engine works on; ``tenants``: who may have conversations in
    an engine; ``is_shared``: whether an engine has a remote tier.
    """

    def __init__(
        self,
        fan_out: FanOut,
        in_flight: Mapping[str, int],
        tenants: Callable[[Engine], Iterable[TenantId]],
        is_shared: Callable[[Engine], bool],
    ) -> None:
        self._fan_out = fan_out
        self._in_flight = in_flight
        self._tenants = tenants
        self._is_shared = is_shared
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def requests(self, engine: Engine) -> int:
        """Return how many requests an engine works on."""
        return self._in_flight.get(engine.spec.name, 0)

    def drain(self, engine: Engine) -> None:
        """Begin; draining what is drained changes nothing."""
        if engine.drain is None:
            engine.drain = drain = Drain()
            task = asyncio.get_running_loop().create_task(self._run(engine, drain))
            self._tasks[engine.spec.name] = task

    def resume(self, engine: Engine) -> None:
        """Let it serve again, however far it is."""
        engine.drain = None
        task = self._tasks.pop(engine.spec.name, None)
        if task is not None:
            task.cancel()

    async def _run(self, engine: Engine, drain: Drain) -> None:
        while self.requests(engine) and engine.is_ready:
            await asyncio.sleep(_LOOK_S)
        try:
            drain.note = await self._move(engine, drain)
        except ServerError as error:
            drain.note = f"conversations were not moved: {error}"
        drain.state = DrainState.DRAINED
        logger.info("engine %s is drained: %s", engine.spec.name, drain.row())

    async def _move(self, engine: Engine, drain: Drain) -> str | None:
        if not self._is_shared(engine):
            return "without a remote tier, conversations are computed again elsewhere"
        found = [
            (tenant, session)
            for tenant in self._tenants(engine)
            for session in await self._sessions(engine, tenant)
        ]
        drain.sessions = len(found)
        at_once = asyncio.Semaphore(_AT_ONCE)
        await asyncio.gather(*(self._pause(engine, drain, at_once, *one) for one in found))
        await asyncio.sleep(_STORE_S)
        left = drain.sessions - drain.moved
        return f"{left} conversations are not in the store as a whole" if left else None

    async def _sessions(self, engine: Engine, tenant: TenantId) -> list[str]:
        names: list[str] = []
        while True:
            page = f"page={len(names) // _PAGE}&limit={_PAGE}"
            target = f"/ext/v1/sessions?tenant={quote(tenant)}&{page}"
            data = await self._asked(engine, "GET", target)
            names += [row["session"] for row in data["sessions"]]
            if len(data["sessions"]) < _PAGE:
                return names

    async def _pause(
        self,
        engine: Engine,
        drain: Drain,
        at_once: asyncio.Semaphore,
        tenant: TenantId,
        session: str,
    ) -> None:
        target = f"/ext/v1/sessions/{quote(session)}/pause?tenant={quote(tenant)}"
        async with at_once:
            try:
                data = await self._asked(engine, "POST", target, {"to": Tier.NVME})
            except ServerError as error:
                logger.warning("a conversation of %s was not moved: %s", tenant, error)
                return
        drain.moved += not any(data["in_use"].values())

    async def _asked(
        self, engine: Engine, method: str, target: str, data: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        body = None if data is None else json.dumps(data).encode()
        answer = await self._fan_out.ask(engine, method, target, body=body)
        found = answer.json()
        if answer.status != 200 or not isinstance(found, dict):
            raise ServerError(f"engine {engine.spec.name}: {answer.status}: {found}")
        return found

"""Keeps the engines running, each on its own: the end of one means nothing to the others."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sglang_ext.gateway.life import Drain, Life, State
from sglang_ext.gateway.plan import EngineSpec

__all__ = ["Engine", "Process", "Supervisor"]

logger = logging.getLogger(__name__)

_PROBE_S = 0.2
_WATCH_S = 1.0
_STOP_S = 8.0
"""How long an engine may take to go; it gives its own requests 6 seconds."""


class Process(Protocol):
    """What runs an engine; see ``process.EngineProcess``."""

    @property
    def pid(self) -> int: ...

    async def wait(self) -> int: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


@dataclass
class Engine:
    """One engine: where it listens, its process while it has one here, and its life.

    ``drain``: where taking it out of service stands. Of one on another machine, ``own`` is what its
    own policy file says of that machine, and ``problem`` why it does not serve.
    """

    spec: EngineSpec
    url: str
    life: Life = field(default_factory=Life)
    process: Process | None = None
    drain: Drain | None = None
    own: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it serves."""
        return self.life.state is State.READY

    @property
    def takes_requests(self) -> bool:
        """Whether new requests may go there."""
        return self.is_ready and self.drain is None

    def row(self) -> dict[str, Any]:
        """Return it as plain data, for the operator."""
        return {
            "engine": self.spec.name,
            "state": self.life.state.value,
            "pid": None if self.process is None else self.process.pid,
            "restarts": self.life.restarts,
            "gpus": list(self.spec.gpus),
            "dedicated_to": self.spec.tenant,
            "url": self.spec.url or None,
            "problem": self.problem,
            "drain": None if self.drain is None else self.drain.row(),
        }


class Supervisor:
    """Starts engines and starts them again. One loop; ``run`` once.

    ``start`` makes the process of an engine, ``answers`` tells whether it serves yet; ``on_ready``
    is called whenever one does. An engine of another machine is only watched.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        start: Callable[[Engine], Awaitable[Process]],
        answers: Callable[[Engine], Awaitable[bool]],
        on_ready: Callable[[Engine], None] = lambda engine: None,
    ) -> None:
        self.engines: Mapping[str, Engine] = {engine.spec.name: engine for engine in engines}
        self._start = start
        self._answers = answers
        self._on_ready = on_ready
        self._stopping = asyncio.Event()

    async def run(self) -> int:
        """Keep all engines until ``stop``; return 0, or the status of one that never served."""
        tasks = [asyncio.create_task(self._keep(one)) for one in self.engines.values()]
        for ended in asyncio.as_completed(tasks):
            status = await ended
            if status:
                self.stop()
                await asyncio.wait(tasks)
                return status
        return 0

    def stop(self) -> None:
        """Ask every engine to finish what runs and to go; ``run`` returns once they are gone."""
        self._stopping.set()

    def kill(self) -> None:
        """End every engine now."""
        self._stopping.set()
        for engine in self.engines.values():
            if engine.process is not None:
                engine.process.kill()

    async def _watch(self, engine: Engine) -> int:
        """See when an engine of another machine comes and goes, until all shall stop."""
        looking = asyncio.create_task(self._look(engine))
        stopping = asyncio.create_task(self._stopping.wait())
        done, _ = await asyncio.wait({looking, stopping}, return_when=asyncio.FIRST_COMPLETED)
        for task in (looking, stopping):
            task.cancel()
        if looking in done:
            await looking
        return 0

    async def _look(self, engine: Engine) -> None:
        while True:
            answers = await self._answers(engine)
            if answers and not engine.is_ready:
                self._became_ready(engine)
            elif not answers:
                engine.life.away()
            await asyncio.sleep(_WATCH_S)

    async def _keep(self, engine: Engine) -> int:
        if engine.spec.url:
            return await self._watch(engine)
        life = engine.life
        while not self._stopping.is_set():
            status = await self._live(engine)
            if self._stopping.is_set():
                break
            life.ended(time.monotonic())
            if life.state is State.FAILED:
                logger.error("engine %s ended with status %d", engine.spec.name, status)
                return status or 1
            wait = max(0.0, life.again_at - time.monotonic())
            logger.error(
                "engine %s ended with status %d; it starts again in %.1f s",
                *(engine.spec.name, status, wait),
            )
            await self._stopped_within(wait)
        life.stopped()
        return 0

    async def _live(self, engine: Engine) -> int:
        """Run it once, from start to end; return its exit status."""
        try:
            engine.process = process = await self._start(engine)
        except OSError as error:
            logger.error("engine %s: cannot be started: %s", engine.spec.name, error)
            engine.life.started()
            return 1
        engine.life.started()
        ended = asyncio.ensure_future(process.wait())
        helpers = [
            asyncio.create_task(self._see_it_ready(engine)),
            asyncio.create_task(self._end_it(engine, process)),
        ]
        try:
            return await ended
        finally:
            for helper in helpers:
                helper.cancel()
            engine.process = None

    async def _see_it_ready(self, engine: Engine) -> None:
        while not await self._answers(engine):
            await asyncio.sleep(_PROBE_S)
        self._became_ready(engine)

    def _became_ready(self, engine: Engine) -> None:
        engine.life.became_ready(time.monotonic())
        logger.info("engine %s is ready", engine.spec.name)
        self._on_ready(engine)

    async def _end_it(self, engine: Engine, process: Process) -> None:
        """Once all shall stop: ask, wait, insist."""
        await self._stopping.wait()
        process.terminate()
        await asyncio.sleep(_STOP_S)
        logger.warning("engine %s did not go; it is ended now", engine.spec.name)
        process.kill()

    async def _stopped_within(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return

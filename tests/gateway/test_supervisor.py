"""Engines live and end on their own; whatever ends, no process is left."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from sglang_ext.gateway import life
from sglang_ext.gateway.life import State
from sglang_ext.gateway.place import Place, own_place
from sglang_ext.gateway.plan import EngineSpec
from sglang_ext.gateway.process import EngineProcess
from sglang_ext.gateway.supervisor import Engine, Supervisor


class Fake:
    """A process that ends when it is told to."""

    def __init__(self, pid: int, *, stubborn: bool = False) -> None:
        self.pid = pid
        self.asked = False
        self._stubborn = stubborn
        self._ended = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        return int(await self._ended)

    def end(self, status: int) -> None:
        if not self._ended.done():
            self._ended.set_result(status)

    def terminate(self) -> None:
        self.asked = True
        if not self._stubborn:
            self.end(0)

    def kill(self) -> None:
        self.end(-9)


class Rig:
    """A supervisor of engines ``a`` and ``b`` with fake processes."""

    def __init__(self) -> None:
        self.started: dict[str, list[Fake]] = {"a": [], "b": []}
        self.engines = [
            Engine(EngineSpec(name, None, index, 2), "") for index, name in enumerate("ab")
        ]
        self.supervisor = Supervisor(self.engines, self._start, self._answers)
        self.silent: set[str] = set()
        self._pids = iter(range(100, 1000))

    async def _start(self, engine: Engine) -> Fake:
        process = Fake(next(self._pids))
        self.started[engine.spec.name].append(process)
        return process

    async def _answers(self, engine: Engine) -> bool:
        return engine.spec.name not in self.silent

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.001)


def test_an_engine_comes_back_and_the_other_never_notices() -> None:
    async def test() -> None:
        rig = Rig()
        a, b = rig.engines
        task = asyncio.create_task(rig.supervisor.run())
        await rig.until(lambda: a.is_ready and b.is_ready)
        rig.started["a"][0].end(-9)
        await rig.until(lambda: a.life.state is State.WAITING)
        assert a.process is None
        assert b.is_ready
        await rig.until(lambda: a.is_ready)
        assert (a.life.restarts, b.life.restarts) == (1, 0)
        assert [len(rig.started[name]) for name in "ab"] == [2, 1]
        rig.supervisor.stop()
        assert await task == 0
        assert rig.started["a"][1].asked
        assert {engine.life.state for engine in rig.engines} == {State.STOPPED}

    asyncio.run(asyncio.wait_for(test(), 20))


def test_an_engine_that_never_served_ends_all_with_its_status() -> None:
    async def test() -> None:
        rig = Rig()
        rig.silent = {"b"}
        task = asyncio.create_task(rig.supervisor.run())
        await rig.until(lambda: rig.engines[0].is_ready and bool(rig.started["b"]))
        rig.started["b"][0].end(2)
        assert await task == 2
        assert rig.started["a"][0].asked
        assert len(rig.started["b"]) == 1

    asyncio.run(asyncio.wait_for(test(), 20))


def test_a_stop_while_an_engine_waits_or_starts() -> None:
    async def test() -> None:
        rig = Rig()
        task = asyncio.create_task(rig.supervisor.run())
        await rig.until(lambda: all(engine.is_ready for engine in rig.engines))
        rig.silent = {"a", "b"}
        rig.started["a"][0].end(1)
        await rig.until(lambda: rig.engines[0].life.state is State.WAITING)
        rig.supervisor.stop()
        assert await task == 0
        assert len(rig.started["a"]) == 1

    asyncio.run(asyncio.wait_for(test(), 20))


def test_a_kill_ends_what_does_not_go() -> None:
    async def test() -> None:
        rig = Rig()
        task = asyncio.create_task(rig.supervisor.run())
        await rig.until(lambda: all(engine.is_ready for engine in rig.engines))
        for processes in rig.started.values():
            processes[0]._stubborn = True
        rig.supervisor.stop()
        await asyncio.sleep(0)
        assert not task.done()
        rig.supervisor.kill()
        assert await task == 0

    asyncio.run(asyncio.wait_for(test(), 20))


_FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, file=open(sys.argv[1], "w"), flush=True)
time.sleep(600)
"""


def test_what_an_engine_leaves_behind_is_ended_too(tmp_path: Path) -> None:
    async def test() -> None:
        note = tmp_path / "child"
        process = await EngineProcess.start([sys.executable, "-c", _FAMILY, str(note)], {})
        while not (note.exists() and note.read_text().strip()):
            await asyncio.sleep(0.01)
        child = psutil.Process(int(note.read_text()))
        os.kill(process.pid, signal.SIGKILL)
        assert await process.wait() == -signal.SIGKILL
        await asyncio.to_thread(psutil.wait_procs, [child], 10)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE

    asyncio.run(asyncio.wait_for(test(), 20))


_ENGINE = """
import sys, time
from sglang_ext.gateway.place import live_with
live_with(int(sys.argv[1]))
print("alive", flush=True)
time.sleep(600)
"""
_GATEWAY = f"""
import os, subprocess, sys
command = [sys.executable, "-c", {_ENGINE!r}, str(os.getpid())]
engine = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
print(engine.pid, engine.stdout.readline().strip(), flush=True)
engine.wait()
"""


def test_an_engine_ends_with_its_gateway_however_that_ends() -> None:
    command = [sys.executable, "-c", _GATEWAY]
    gateway = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert gateway.stdout is not None
    pid, alive = gateway.stdout.readline().split()
    assert alive == "alive"
    engine = psutil.Process(int(pid))
    gateway.kill()
    gateway.wait()
    gateway.stdout.close()
    assert not psutil.wait_procs([engine], 10)[1]


def test_an_engine_that_starts_too_late_ends_at_once() -> None:
    finished = subprocess.run([sys.executable, "-c", _ENGINE, "1"], check=False, timeout=30)
    assert finished.returncode == 1


def test_a_place_survives_the_environment() -> None:
    place = Place("bank", 1, 2, 77, "secret")
    assert own_place(place.variables()) == place
    assert own_place({}) is None
    assert "secret" not in repr(place)


def test_the_waits_are_those_that_the_documentation_states() -> None:
    assert (life._FIRST_DELAY_S, life._LONGEST_DELAY_S) == (0.5, 30.0)

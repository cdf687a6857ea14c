"""Runs several engines and the gateway in front of them, until a signal ends all of it."""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from sglang_ext import active
from sglang_ext.audit_log import AuditLog
from sglang_ext.errors import ServerError
from sglang_ext.gateway.app import Gateway
from sglang_ext.gateway.commands import Address, address_of, check_flags, engine_command
from sglang_ext.gateway.draining import Drainer
from sglang_ext.gateway.fan_out import FanOut
from sglang_ext.gateway.joining import Joining
from sglang_ext.gateway.machine import free_ports, gpu_variables, visible_gpus
from sglang_ext.gateway.metrics import GatewayMetrics
from sglang_ext.gateway.nodes import Nodes, read_nodes
from sglang_ext.gateway.own_routes import own_app
from sglang_ext.gateway.place import Place
from sglang_ext.gateway.plan import narrowed, plan_engines
from sglang_ext.gateway.policy_link import PolicyLink
from sglang_ext.gateway.prefix_index import PrefixIndex
from sglang_ext.gateway.process import EngineProcess
from sglang_ext.gateway.relay import Relay, new_session
from sglang_ext.gateway.routing import Routing
from sglang_ext.gateway.supervisor import Engine, Supervisor
from sglang_ext.launch_checks import check_port
from sglang_ext.live_policy import LivePolicy
from sglang_ext.observe.json_log import JsonFormatter
from sglang_ext.policy_file import PolicyFile
from sglang_ext.policy_routes import mount
from sglang_ext.tenancy.auth import App, Callers, TenantAuth
from sglang_ext.tenancy.document import write_yaml
from sglang_ext.tenancy.loader import build_policy
from sglang_ext.tenancy.policy import Isolation
from sglang_ext.types import TenantId

__all__ = ["UVICORN", "log_to_stderr", "serve_engines"]

logger = logging.getLogger(__name__)

_GRACE_S = 7
"""For answers that are on their way; the engines give their requests 6 seconds."""
_PROBE_S = 30.0
"""SGLang gives its own check of an engine 20 seconds."""
_INTERRUPTED = 130


def serve_engines(own: Namespace, flags: Sequence[str], file: PolicyFile) -> int:
    """Serve the policy in force with an engine for each part of it; return the exit status.

    Raises SglangExtError before anything is started where that cannot be.
    """
    check_flags(flags)
    policy = active.policy()
    nodes = Nodes(secrets.token_urlsafe(32)) if own.nodes is None else read_nodes(own.nodes)
    specs = plan_engines(policy, own.engines, visible_gpus(), nodes.urls)
    documents = {spec.name: narrowed(policy, spec, specs) for spec in specs}
    for document in documents.values():
        build_policy(document)
    address = address_of(flags)
    check_port(*address)
    ports = free_ports(len(specs))
    engines = [
        Engine(spec, spec.url or f"http://127.0.0.1:{port}")
        for spec, port in zip(specs, ports, strict=True)
    ]
    with tempfile.TemporaryDirectory(prefix="sglang-ext-") as folder:
        server = _Server(own, flags, engines, Path(folder), nodes.secret)
        for engine in engines:
            server.write(engine, documents[engine.spec.name])
        return _loop().run(server.run(file, address))


def _loop() -> asyncio.Runner:
    import uvloop

    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


@dataclass(frozen=True)
class _Server:
    """What the parts of one run have in common. ``folder`` holds each engine's policy."""

    own: Namespace
    flags: Sequence[str]
    engines: Sequence[Engine]
    folder: Path
    secret: str

    def file_of(self, engine: Engine) -> Path:
        return self.folder / f"{engine.spec.name}.yaml"

    def write(self, engine: Engine, document: Mapping[str, Any]) -> None:
        """Let an engine start with this policy from now on; a node has a file of its own."""
        if engine.spec.url:
            return
        fresh = self.file_of(engine).with_suffix(".new")
        fresh.write_text(write_yaml(document), encoding="utf-8")
        fresh.replace(self.file_of(engine))

    async def start(self, engine: Engine) -> EngineProcess:
        """Start the process of an engine."""
        spec = engine.spec
        place = Place(spec.name, spec.index, spec.count, os.getpid(), self.secret)
        port = int(engine.url.rpartition(":")[2])
        command = engine_command(spec, self.file_of(engine), port, self.own, self.flags)
        return await EngineProcess.start(command, {**place.variables(), **gpu_variables(spec.gpus)})

    async def run(self, file: PolicyFile, address: Address) -> int:
        """Serve until a signal comes, or until an engine shows that it cannot serve at all."""
        async with new_session() as session:
            fan_out = FanOut(session, self.secret)
            metrics = GatewayMetrics()
            index, joining = PrefixIndex(), Joining(self.engines, fan_out)

            async def answers(engine: Engine) -> bool:
                return await (
                    joining.serves(engine) if engine.spec.url else _answers(engine, fan_out)
                )

            def ready(engine: Engine) -> None:
                # Its memory is empty.
                index.forget_engine(engine.spec.name)
                self._tell_if_all()

            supervisor = Supervisor(self.engines, self.start, answers, ready)
            relay = Relay(session, self.secret, metrics.failed)
            app = self._app(file, relay, fan_out, metrics, index)
            door = _Door(uvicorn.Config(app, **address._asdict(), **UVICORN))
            return await _until_a_signal(door, supervisor)

    def _app(
        self,
        file: PolicyFile,
        relay: Relay,
        fan_out: FanOut,
        metrics: GatewayMetrics,
        index: PrefixIndex,
    ) -> App:
        routing = Routing(engine.spec for engine in self.engines)
        callers, refusals = Callers(active.policy()), active.request_metrics()
        log = AuditLog(self.own.audit_log, refusals.audit_line_lost)
        link = PolicyLink(self.engines, fan_out, self.write, _end, index.forget_owner)
        live = LivePolicy(file, callers, log, link.ask, link)
        signal.signal(signal.SIGHUP, live.hang_up)
        drainer = Drainer(fan_out, relay.in_flight, _conversing, _has_remote)
        own = own_app(self.engines, routing, fan_out, drainer, index, metrics.note)
        mount(own, live, log, link.ask)
        by_name = {engine.spec.name: engine for engine in self.engines}
        gateway = Gateway(by_name, routing, relay, fan_out, own, index)
        return TenantAuth(gateway, callers, lambda key: False, refusals.refused)

    def _tell_if_all(self) -> None:
        if all(engine.is_ready for engine in self.engines):
            names = ", ".join(engine.spec.name for engine in self.engines)
            logger.info("all %d engines are ready: %s", len(self.engines), names)


UVICORN: dict[str, Any] = {
    "lifespan": "off",
    "log_level": "warning",
    "access_log": False,
    "timeout_graceful_shutdown": _GRACE_S,
    "timeout_keep_alive": 75,
    "ws": "none",
}
"""How the gateway's own server runs, beside where."""


class _Door(uvicorn.Server):
    """Leaves signals to us: the engines have to end as well."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _conversing(engine: Engine) -> list[TenantId]:
    """Return who may have conversations in a shared engine; a dedicated one is never drained."""
    tenants = active.policy().tenants.values()
    return [one.name for one in tenants if one.isolation is not Isolation.DEDICATED]


def _has_remote(engine: Engine) -> bool:
    """Tell whether the disk's pages are copied where other engines find them."""
    tiers = (
        engine.own.get("tiers", {}) if engine.spec.url else active.policy().document.get("tiers")
    )
    return "remote" in (tiers or {})


async def _answers(engine: Engine, fan_out: FanOut) -> bool:
    try:
        answer = await fan_out.ask(engine, "GET", "/health", seconds=_PROBE_S)
    except ServerError:
        return False
    return answer.status == 200


def _end(engine: Engine) -> None:
    if engine.process is not None:
        engine.process.kill()


async def _until_a_signal(door: _Door, supervisor: Supervisor) -> int:
    """Serve; at a signal, or where an engine cannot serve, finish what runs and end the engines."""
    status = [0]
    loop = asyncio.get_running_loop()

    def stop(sent: signal.Signals) -> None:
        if door.should_exit:
            supervisor.kill()
            door.force_exit = True
        status[0] = _INTERRUPTED if sent is signal.SIGINT else 0
        door.should_exit = True
        supervisor.stop()

    for sent in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(sent, stop, sent)
    engines = asyncio.ensure_future(supervisor.run())
    engines.add_done_callback(lambda _: setattr(door, "should_exit", True))
    try:
        await door.serve()
    finally:
        supervisor.stop()
    failed = await engines
    return failed or status[0]


def log_to_stderr(*, as_json: bool) -> None:
    """Write what the gateway says where the engines write."""
    handler = logging.StreamHandler(sys.stderr)
    form = JsonFormatter() if as_json else logging.Formatter("[%(asctime)s] gateway: %(message)s")
    handler.setFormatter(form)
    logging.basicConfig(level=logging.INFO, handlers=[handler])

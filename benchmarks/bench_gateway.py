"""What the gateway adds: the same requests to an engine directly and through it, in turns.

The engine is a server of a few lines that answers at once, in a process of its own, so that nothing
but the way is measured: key, routing by the beginning of the text, two more passes through a
socket. A short answer, a prompt of 100 kB (new each time, and one that the gateway has seen), and a
stream of events; connections are kept, as clients do.
"""

import itertools
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import httpx

from report import Report, arguments, spread
from sglang_ext.gateway.machine import free_ports
from sglang_ext.tenancy.keys import digest

_EVENTS = 50
_AT_ONCE = 16
_BAR_S = 0.0015
_KINDS: dict[str, tuple[str, int]] = {
    "short": ("/generate", 200),
    "long prompt": ("/generate", 100_000),
    "long prompt, seen before": ("/generate", 100_000),
    "stream": ("/v1/completions", 200),
}


_NUMBERS = itertools.count()


class _Times(NamedTuple):
    """Seconds to the first byte of an answer, and to its last."""

    first: float
    last: float


async def _engine(scope: Any, receive: Any, send: Any) -> None:
    """Answer at once: a short text, or a stream of events for ``/v1/completions``."""
    more = True
    while more:
        more = (await receive()).get("more_body", False)
    streamed = scope["path"] == "/v1/completions"
    kind = b"text/event-stream" if streamed else b"application/json"
    start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]}
    await send(start)
    for number in range(_EVENTS if streamed else 0):
        event = b'data: {"text": "token %d"}\n\n' % number
        await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b'{"text": "done"}'})


def _run_engine(port: int) -> None:
    _run(_engine, port)


def _run_gateway(port: int, engine_port: int) -> None:
    """Serve what ``gateway.serve`` builds, before an engine that it did not start."""
    import asyncio

    asyncio.run(_gateway(port, engine_port))


async def _gateway(port: int, engine_port: int) -> None:
    import uvicorn

    from sglang_ext.gateway.app import Gateway
    from sglang_ext.gateway.draining import Drainer
    from sglang_ext.gateway.fan_out import FanOut
    from sglang_ext.gateway.life import Life, State
    from sglang_ext.gateway.own_routes import own_app
    from sglang_ext.gateway.plan import EngineSpec
    from sglang_ext.gateway.prefix_index import PrefixIndex
    from sglang_ext.gateway.relay import Relay, new_session
    from sglang_ext.gateway.routing import Routing
    from sglang_ext.gateway.serve import UVICORN
    from sglang_ext.gateway.supervisor import Engine
    from sglang_ext.tenancy.auth import Callers, TenantAuth
    from sglang_ext.tenancy.loader import build_policy

    # Twice the same engine: where one has to be chosen, texts are looked into.
    specs = [EngineSpec(f"shared-{place}", None, place, 2) for place in range(2)]
    url = f"http://127.0.0.1:{engine_port}"
    engines = {spec.name: Engine(spec, url, Life(State.READY)) for spec in specs}
    tenants = {"a": {"api_keys": [digest("key-a")]}}
    policy = build_policy({"version": 1, "tenants": tenants})
    async with new_session() as session:
        fan_out, routing, index = FanOut(session, "secret"), Routing(specs), PrefixIndex()
        relay = Relay(session, "secret")
        drainer = Drainer(fan_out, relay.in_flight, lambda one: [], lambda one: False)
        own = own_app(list(engines.values()), routing, fan_out, drainer, index)
        gateway = Gateway(engines, routing, relay, fan_out, own, index)
        app = TenantAuth(gateway, Callers(policy), lambda key: False)
        await uvicorn.Server(uvicorn.Config(app, port=port, **UVICORN)).serve()


def _run(app: Any, port: int) -> None:
    import uvicorn

    uvicorn.run(app, port=port, log_level="warning", access_log=False)


@contextmanager
def _process(target: Any, *ports: int) -> Iterator[str]:
    """Run ``target`` in a process of its own until the block ends; yield where it listens."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=ports, daemon=True)
    process.start()
    url = f"http://127.0.0.1:{ports[0]}"
    try:
        _wait(url)
        yield url
    finally:
        process.terminate()
        process.join()


def _wait(url: str) -> None:
    end = time.monotonic() + 60
    while True:
        try:
            httpx.get(url + "/health")
            return
        except httpx.TransportError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def _seconds(client: httpx.Client, url: str, kind: str) -> _Times:
    """Send one request."""
    path, size = _KINDS[kind]
    text = "a" * size if "seen" in kind else f"{next(_NUMBERS)} " + "a" * size
    body = json.dumps({"text": text}).encode()
    headers = {"authorization": "Bearer key-a", "content-type": "application/json"}
    start, first = time.perf_counter(), 0.0
    with client.stream("POST", url + path, content=body, headers=headers) as answer:
        answer.raise_for_status()
        for _ in answer.iter_raw():
            first = first or time.perf_counter() - start
    return _Times(first, time.perf_counter() - start)


def _pairs(
    client: httpx.Client, direct: str, gateway: str, kind: str, rounds: int
) -> list[tuple[_Times, _Times]]:
    """Return (direct, through the gateway) of each round, in an order that changes."""
    pairs = []
    for number in range(rounds):
        order = [direct, gateway] if number % 2 else [gateway, direct]
        found = {url: _seconds(client, url, kind) for url in order}
        pairs.append((found[direct], found[gateway]))
    return pairs


def _rate(client: httpx.Client, url: str, count: int) -> float:
    """Return short requests a second with several at once."""
    start = time.perf_counter()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(lambda _: _seconds(client, url, "short"), range(count)))
    return count / (time.perf_counter() - start)


def _p99(values: list[float]) -> float:
    return sorted(values)[round(0.99 * (len(values) - 1))]


def _record(report: Report, kind: str, pairs: list[tuple[_Times, _Times]]) -> None:
    first = [through.first - alone.first for alone, through in pairs]
    whole = [through.last - alone.last for alone, through in pairs]
    alone = [times.first for times, _ in pairs]
    report.figures[f"{kind}: direct, first byte, s"] = vars(spread(alone))
    report.figures[f"{kind}: added to the first byte, s"] = vars(spread(first))
    report.figures[f"{kind}: added to the last byte, s"] = vars(spread(whole))
    report.figures[f"{kind}: added to the first byte, p99, s"] = _p99(first)
    report.runs.append({"kind": kind, "added to the first byte": first})
    value = statistics.median(first)
    report.at_most(f"{kind}: added to the first byte, p50, s", value, _BAR_S)


def main() -> int:
    """Run the benchmark and return its exit status."""
    options = arguments("bench_gateway", __doc__ or "").parse_args()
    rounds, burst = (200, 200) if options.quick else (2000, 2000)
    report = Report("What the gateway adds to an engine that answers at once")
    with ExitStack() as stack:
        ports = free_ports(2)
        direct = stack.enter_context(_process(_run_engine, ports[0]))
        gateway = stack.enter_context(_process(_run_gateway, ports[1], ports[0]))
        client = stack.enter_context(httpx.Client(timeout=30))
        for kind in _KINDS:
            _pairs(client, direct, gateway, kind, 20)
        for kind in _KINDS:
            _record(report, kind, _pairs(client, direct, gateway, kind, rounds))
        rates = [(_rate(client, direct, burst), _rate(client, gateway, burst)) for _ in range(3)]
    report.figures[f"requests a second, {_AT_ONCE} at once, direct"] = max(one for one, _ in rates)
    report.figures[f"requests a second, {_AT_ONCE} at once, gateway"] = max(two for _, two in rates)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())

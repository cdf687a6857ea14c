"""What tenants cost: the same requests against stock SGLang and ours, interleaved in one run.

Both engines run at once with the same flags on the same platform; each request goes to one and then
to the other, in an order that is drawn anew. Two kinds of request: a new prompt, and the same
prompt again, which hits. Then both get the same small bursts, for throughput.

A third engine is ours with all that operators look at: usage kept in a file, /metrics scraped every
15 s, and the page asking every 2 s.
"""

import itertools
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from engines import Engine, ask, demo_flags, engine, write_policy
from report import Report, arguments, spread

_WORDS = ("river", "stone", "lamp", "garden", "north", "winter", "paper", "cloud", "bridge", "song")
_BURST = 8


def _prompt(draw: random.Random, words: int) -> str:
    return " ".join(draw.choice(_WORDS) for _ in range(words))


def _latencies(
    client: httpx.Client, engines: list[Engine], draw: random.Random, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Return seconds to the first token by kind of request and engine."""
    times: dict[str, dict[str, list[float]]] = {
        kind: {server.name: [] for server in engines} for kind in ("cold", "hit")
    }
    for _ in range(rounds):
        text = _prompt(draw, 150)
        for kind in ("cold", "hit"):
            for server in draw.sample(engines, len(engines)):
                times[kind][server.name].append(ask(client, server, text, 2).ttft)
    return times


def _throughputs(
    client: httpx.Client, engines: list[Engine], draw: random.Random, rounds: int
) -> dict[str, list[float]]:
    """Return output tokens per second of bursts of concurrent requests, by engine."""
    rates: dict[str, list[float]] = {server.name: [] for server in engines}
    with ThreadPoolExecutor(_BURST) as pool:
        for _ in range(rounds):
            texts = [_prompt(draw, 60) for _ in range(_BURST)]
            for server in draw.sample(engines, len(engines)):
                start = time.perf_counter()
                answers = list(pool.map(lambda text, s=server: ask(client, s, text, 16), texts))
                seconds = time.perf_counter() - start
                rates[server.name].append(sum(a.output_tokens for a in answers) / seconds)
    return rates


def _ratios(ours: list[float], theirs: list[float]) -> list[float]:
    return [mine / other for mine, other in zip(ours, theirs, strict=True)]


def _p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, round(0.99 * (len(values) - 1)))]


def _record(report: Report, kind: str, times: dict[str, list[float]]) -> None:
    ours, theirs = times["ours"], times["stock"]
    report.figures[f"{kind}: stock TTFT, s"] = vars(spread(theirs))
    report.figures[f"{kind}: ours TTFT, s"] = vars(spread(ours))
    report.figures[f"{kind}: TTFT p50 ratio of medians"] = statistics.median(
        ours
    ) / statistics.median(theirs)
    report.figures[f"{kind}: TTFT p99 ratio"] = _p99(ours) / _p99(theirs)
    report.figures[f"{kind}: ratio within each pair"] = vars(spread(_ratios(ours, theirs)))
    report.runs.append({"kind": kind, "ours": ours, "stock": theirs})


def main() -> int:
    """Run the benchmark and return its exit status."""
    options = arguments("bench_overhead", __doc__ or "").parse_args()
    rounds, bursts = (12, 3) if options.quick else (150, 20)
    draw = random.Random(options.seed)
    report = Report("Overhead of tenants over stock SGLang")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        policy = write_policy(folder, ["acme", "globex"])
        started = [
            engine("stock", "sglang.launch_server", 33101, _stock_flags()),
            engine("ours", "sglang_ext.launch_server", 33102, _our_flags(policy), "key-acme"),
            engine("watched", "sglang_ext.launch_server", 33103, _billed(policy), "key-acme"),
        ]
        engines = [stack.enter_context(one) for one in started]
        client = stack.enter_context(httpx.Client(timeout=120))
        stack.enter_context(_watching(engines[2]))
        _latencies(client, engines, draw, 5)
        times = _latencies(client, engines, draw, rounds)
        rates = _throughputs(client, engines[:2], draw, bursts)
    for kind, by_engine in times.items():
        _record(report, kind, by_engine)
    pooled = {name: times["cold"][name] + times["hit"][name] for name in times["cold"]}
    ratio = statistics.median(_ratios(pooled["ours"], pooled["stock"]))
    throughput = statistics.median(_ratios(rates["ours"], rates["stock"]))
    report.figures["throughput ratio, ours over stock"] = throughput
    report.runs.append({"kind": "throughput", **rates})
    report.at_most("TTFT p50, ours over stock", ratio, 1.03)
    for kind in ("cold", "hit"):
        value = report.figures[f"{kind}: TTFT p50 ratio of medians"]
        report.at_most(f"TTFT p50 {kind}, ours over stock", value, 1.03)
    watched = statistics.median(_ratios(pooled["watched"], pooled["ours"]))
    report.figures["watched: ratio within each pair"] = vars(
        spread(_ratios(pooled["watched"], pooled["ours"]))
    )
    report.runs.append({"kind": "watched", "ours": pooled["ours"], "watched": pooled["watched"]})
    report.at_most("TTFT p50, billed, scraped and looked at, over ours", watched, 1.01)
    return report.finish(options.json)


@contextmanager
def _watching(server: Engine) -> Iterator[None]:
    """Scrape a server and ask for its page's data as Prometheus and a person would."""
    ended = threading.Event()
    headers = {"authorization": "Bearer key-admin"}

    def watch() -> None:
        for second in itertools.count():
            paths = ["/metrics"] * (second % 15 == 0) + ["/ext/v1/overview"] * (second % 2 == 0)
            for path in paths:
                httpx.get(server.url + path, headers=headers, timeout=60).raise_for_status()
            if ended.wait(1):
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _billed(policy: Path) -> list[str]:
    """Return our flags, with a file for usage."""
    return [*_our_flags(policy), "--usage-db", str(policy.with_name("usage.db"))]


def _stock_flags() -> list[str]:
    return [*demo_flags(20_000), "--enable-metrics", "--enable-cache-report"]


def _our_flags(policy: Path) -> list[str]:
    return ["--tenant-policy", str(policy), *demo_flags(20_000)]


if __name__ == "__main__":
    sys.exit(main())

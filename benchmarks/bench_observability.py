"""What operators' figures cost: /metrics of 10,000 tenants, one finished request, one scrape.

Each is timed on the real metrics in prometheus_client's mode for several processes, as the server
has it, and on nothing else; ``bench_overhead.py`` measures all of it together on a server.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path

from report import Report, arguments, spread
from sglang_ext.metrics import FinishedRequest, RequestMetrics
from sglang_ext.observe.ghosts import GhostPages
from sglang_ext.observe.overview import overview, samples_of
from sglang_ext.observe.recent import RecentRequests
from sglang_ext.observe.usage import UsageRecorder
from sglang_ext.observe.usage_store import UsageStore
from sglang_ext.scheduler_metrics import SchedulerMetrics
from sglang_ext.tenancy.loader import parse_policy
from sglang_ext.types import TenantId

_TENANTS = 10_000
_NAMED = 50
_MOST_BYTES = 2_000_000
_MOST_SECONDS = 0.2


def _times(run: Callable[[], object], repeats: int, each: int = 1) -> list[float]:
    """Return seconds of one of ``each`` runs, ``repeats`` times."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(each):
            run()
        found.append((time.perf_counter() - start) / each)
    return found


def _request(draw: random.Random, tenant: str) -> FinishedRequest:
    cached = {"hbm": draw.randrange(0, 1000), "cpu": draw.randrange(0, 500)}
    return FinishedRequest(
        tenant=tenant, prompt=2000, output=100, cached=cached, seconds=1.0, first_token=0.2
    )


def _filled(tenants: list[TenantId], recorder: UsageRecorder) -> RequestMetrics:
    """Return metrics that every tenant has used, with all observers of a server."""
    draw = random.Random(1)
    metrics, scheduler = RequestMetrics(_NAMED, tenants), SchedulerMetrics(_NAMED, tenants)
    metrics.page_size = 16
    metrics.observers += [RecentRequests(lambda: 16), recorder]
    for tenant in tenants:
        with metrics.request(tenant):
            pass
        metrics.first_token(tenant, 0.2)
        metrics.finished(_request(draw, tenant))
        scheduler.admitted(tenant, 0.1)
        scheduler.skipped(tenant, "quota")
    return metrics


def _scrape() -> bytes:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector

    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    return generate_latest(registry)


def _overview(recent: RecentRequests) -> object:
    from prometheus_client import CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector

    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    policy = parse_policy("version: 1\ntenants: {a: {}}")
    return overview(samples_of(registry.collect()), recent, policy)


def main() -> int:
    """Run the benchmark and return its exit status."""
    options = arguments("bench_observability", __doc__ or "").parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # prometheus_client looks for it when it is imported, which is at the first metric.
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        return _measure(options, Path(folder))


def _measure(options: argparse.Namespace, folder: Path) -> int:
    repeats = 10 if options.quick else 50
    draw = random.Random(options.seed)
    report = Report("Cost of the figures for operators")
    tenants = [TenantId(f"tenant-{number:05}") for number in range(_TENANTS)]
    recorder = UsageRecorder(UsageStore(folder / "usage.sqlite"))
    metrics = _filled(tenants, recorder)
    finished = _request(draw, tenants[0])
    ghosts = GhostPages()
    prompt = array("q", (draw.randrange(150_000) for _ in range(10_000)))
    figures = {
        "one finished request, us": _times(lambda: metrics.finished(finished), repeats, 200),
        "recomputed tokens of a prompt of 10,000, us": _times(
            lambda: ghosts.computed("t:a", prompt, 0, 16), repeats, 20
        ),
    }
    for name, seconds in figures.items():
        report.figures[name] = vars(spread([1e6 * one for one in seconds]))
    scrapes = _times(_scrape, repeats)
    report.figures["a scrape of 10,000 tenants, s"] = vars(spread(scrapes))
    pictures = _times(lambda: _overview(metrics.observers[0]), repeats)  # type: ignore[arg-type]
    report.figures["the overview of the page, s"] = vars(spread(pictures))
    report.runs.append({"scrape_s": scrapes, "overview_s": pictures, "tenants": _TENANTS})
    size = len(_scrape())
    report.at_most("/metrics with 10,000 tenants, bytes", size, _MOST_BYTES)
    report.at_most("a scrape, median seconds", spread(scrapes).median, _MOST_SECONDS)
    recorder.close()
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())

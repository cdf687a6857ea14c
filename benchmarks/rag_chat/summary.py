"""From requests to the figures of a cell, and from cells to those of an engine."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.rag_chat.intervals import percentile
from benchmarks.rag_chat.load import Request

__all__ = ["of_engine", "of_run", "share"]

_SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def share(recomputed: int, known: int) -> float:
    """Return the share recomputed, 0 where nothing came again."""
    return recomputed / known if known else 0.0


def of_run(requests: Sequence[Request], seconds: float, cpu_seconds: float) -> dict[str, Any]:
    """Return what one run measured: totals, by tenant, and the times of every request."""
    good = [request for request in requests if request.error is None]
    totals = _totals(good)
    computed = totals["prompt"] - totals["cached"]
    tenants = sorted({request.tenant for request in requests})
    return {
        "requests": len(requests),
        "errors": sorted({request.error for request in requests if request.error}),
        "failed": len(requests) - len(good),
        "seconds": seconds,
        "output tokens/s": totals["output"] / seconds,
        "prompt and output tokens/s": (totals["prompt"] + totals["output"]) / seconds,
        "cpu seconds": cpu_seconds,
        "cpu ms per computed prompt token": 1e3 * cpu_seconds / max(1, computed),
        **totals,
        "recomputed share": share(totals["recomputed"], totals["known"]),
        "cached but never sent": sum(request.more_cached_than_sent for request in good),
        "tenants": {name: _of_tenant([r for r in good if r.tenant == name]) for name in tenants},
        "ttft": [round(request.ttft, 4) for request in good],
        "gaps": [gap for request in good for gap in request.gaps],
    }


def of_engine(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of an engine over its runs: times of all, and the spread of the rest."""
    figures: dict[str, Any] = {"seeds": [run["seed"] for run in runs]}
    for name in ("output tokens/s", "prompt and output tokens/s", "recomputed share"):
        values = [run[name] for run in runs]
        figures[name] = {"median": median(values), "min": min(values), "max": max(values)}
    for name in ("known", "recomputed", "cached", "prompt", "failed", "cached but never sent"):
        figures[name] = sum(run[name] for run in runs)
    figures["recomputed share of all"] = share(figures["recomputed"], figures["known"])
    computed = figures["prompt"] - figures["cached"]
    cpu = sum(run["cpu seconds"] for run in runs)
    figures["cpu ms per computed prompt token"] = 1e3 * cpu / max(1, computed)
    figures["cpu seconds"] = cpu
    for name, key in (("TTFT, s", "ttft"), ("ITL, s", "gaps")):
        times = [time for run in runs for time in run[key]]
        for label, quantile in _SHARES.items():
            figures[f"{name} {label}"] = percentile(times, quantile)._asdict()
    return figures


def _totals(requests: Sequence[Request]) -> dict[str, int]:
    return {
        name: sum(getattr(request, name) for request in requests)
        for name in ("prompt", "cached", "known", "recomputed", "output")
    }


def _of_tenant(requests: Sequence[Request]) -> dict[str, Any]:
    totals = _totals(requests)
    times = [request.ttft for request in requests]
    return {
        "requests": len(requests),
        **totals,
        "recomputed share": share(totals["recomputed"], totals["known"]),
        "ttft p50": percentile(times, 0.5).value if times else None,
        "ttft p99": percentile(times, 0.99).value if times else None,
    }

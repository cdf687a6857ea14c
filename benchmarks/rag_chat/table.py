"""The table of engines, and the bars that ours has to keep."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.rag_chat.setting import Setting
from benchmarks.report import Report

__all__ = ["add_bars", "print_table", "rows"]

Runs = Sequence[Mapping[str, Any]]

_OURS = ("ours, three tiers", "ours, three tiers, FP8")
_SAME_COMPUTE = ("SGLang", "SGLang + HiCache file", "SGLang + LMCache", "vLLM + LMCache")
"""Whose times and throughput ours has to beat; only its share recomputed for all other peers."""
_LEAST_WORKING_SET = 3.0
HEADER = (
    "engine",
    "tok/s",
    "TTFT p50",
    "TTFT p90",
    "TTFT p99",
    "ITL p50",
    "ITL p99",
    "recomputed",
    "CPU ms/token",
)


def add_bars(report: Report, setting: Setting, found: Mapping[str, Runs]) -> None:
    """Add what must hold for the engines that were measured."""
    good = {name: [run for run in runs if "error" not in run] for name, runs in found.items()}
    budget = setting.budget(())
    sets = [run["working set"] for runs in good.values() for run in runs]
    if sets:
        ratio = min(sets) / (budget.hbm + budget.cpu)
        report.at_least("working set over HBM + CPU", ratio, _LEAST_WORKING_SET)
    stray = sum(run["cached but never sent"] for runs in good.values() for run in runs)
    report.at_most("tokens cached for a tenant that never sent them", stray, 0)
    for ours in _OURS:
        for peer in good:
            if good.get(ours) and good[peer] and not peer.startswith("ours"):
                _compare(report, ours, peer)


def _compare(report: Report, ours: str, peer: str) -> None:
    mine, theirs = report.figures[ours], report.figures[peer]
    key = "recomputed share of all"
    report.at_most(f"{ours}: recomputed, less {peer}'s", mine[key] - theirs[key], 0.0)
    if peer not in _SAME_COMPUTE:
        return
    for name in ("TTFT, s p50", "TTFT, s p99"):
        ratio = mine[name]["value"] / theirs[name]["value"]
        report.at_most(f"{ours}: {name} over {peer}'s", ratio, 1.0)
    ratio = mine["output tokens/s"]["median"] / theirs["output tokens/s"]["median"]
    report.at_least(f"{ours}: tok/s over {peer}'s", ratio, 1.0)


def rows(figures: Mapping[str, Any], names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return a row for each engine under HEADER; a peer that could not run is a row with why."""
    return [_row(name, figures[name]) for name in names]


def _row(name: str, of_engine: Mapping[str, Any]) -> tuple[str, ...]:
    if "error" in of_engine:
        return (name, *[""] * (len(HEADER) - 3), "did not run:", str(of_engine["error"]))
    speed = of_engine["output tokens/s"]
    times = [_seconds(of_engine[f"TTFT, s {label}"]) for label in ("p50", "p90", "p99")]
    gaps = [_seconds(of_engine[f"ITL, s {label}"]) for label in ("p50", "p99")]
    shares = of_engine["recomputed share"]
    recomputed = (
        f"{of_engine['recomputed share of all']:.1%} ({shares['min']:.1%}-{shares['max']:.1%})"
    )
    cpu = f"{of_engine['cpu ms per computed prompt token']:.2f}"
    rate = f"{speed['median']:.1f} ({speed['min']:.1f}-{speed['max']:.1f})"
    return (name, rate, *times, *gaps, recomputed, cpu)


def _seconds(estimate: Mapping[str, float]) -> str:
    return f"{estimate['value']:.3g} ({estimate['low']:.3g}-{estimate['high']:.3g})"


def print_table(report: Report, names: Sequence[str]) -> None:
    """Print all engines: seconds with 95 % intervals, rates with the range of the seeds."""
    table = Table(*HEADER, title=report.title)
    for row in rows(report.figures, names):
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 180).print(table)

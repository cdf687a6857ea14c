"""What the simulator says, and how far it is from what is published. Nothing here is measured.

Three questions: the four published rows of the reference workload, with the error of every cell;
the rate of the simulator itself; and with ``--trace`` how close to a cache that forgets nothing the
tiers of a policy come on a Mooncake trace.
"""

import sys
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.replay import read_trace, simulated
from benchmarks.report import Report, arguments
from sglang_ext.plan.hardware import GPUS, Cluster, Efficiency, Model
from sglang_ext.plan.outcome import Outcome
from sglang_ext.plan.published import ASSUMPTIONS, ROWS, cluster_72b, errors, simulate_row
from sglang_ext.plan.requests import MOONCAKE_BLOCK_TOKENS, rag_requests
from sglang_ext.plan.simulator import Load, simulate
from sglang_ext.plan.tiers import Sizes, TierStack
from sglang_ext.plan.workload import RagShape, RagTraffic, rag_turns
from sglang_ext.tenancy.loader import parse_policy

_MILLION_SECONDS = 300.0
_POINT = 0.01
_BLOCK = 100
_TENANTS, _SPEED = 4, 0.4
_LLAMA_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
_POLICY = """
version: 1
tiers: {cpu: {size: 256GB}, nvme: {size: 2TB, path: /var/lib/sglang-ext}}
defaults: {quota: {hbm: 100%, cpu: 100%, nvme: 100%}}
tenants: {t0: {api_keys: []}, t1: {api_keys: []}, t2: {api_keys: []}, t3: {api_keys: []}}
"""
"""Tiers of the example policy; nobody has a quota, since the trace has no tenants."""


def _published(report: Report) -> None:
    report.figures["assumed of all rows"] = asdict(ASSUMPTIONS)
    for row in ROWS:
        outcome = simulate_row(row)
        cells = {}
        for name, published, found, error in errors(row, outcome):
            cells[name] = {"published": published, "simulated": found, "error": error}
        report.runs.append({"row": row.system, "assumed": asdict(row), "cells": cells})
        for name, cell in cells.items():
            text = f"{cell['published']:g} / {cell['simulated']:.4g} ({cell['error']:+.0%})"
            report.figures[f"{row.system}: {name}, published / simulated"] = text


def _rate(report: Report, conversations: int) -> None:
    """Simulate three tiers under pressure, and say what a million requests take."""
    turns = rag_turns(RagShape(), RagTraffic(conversations=conversations, tenants=20), 0)
    cluster = cluster_72b(Efficiency())
    tokens = {"hbm": 3_000_000, "cpu": 4_000_000, "nvme": 12_000_000}
    stack = TierStack(Sizes(**tokens, kv_bytes=cluster.kv_bytes, block=_BLOCK))
    start, load = time.process_time(), Load()
    served = simulate(rag_requests(turns, 8.0, _BLOCK), cluster, stack, load=load)
    count = len(Outcome.of(served, load).ttft)
    seconds = (time.process_time() - start) * 1e6 / count
    report.figures["requests simulated for the rate"] = count
    report.at_most("CPU seconds for 1,000,000 requests, three tiers", seconds, _MILLION_SECONDS)


def _trace(report: Report, path: Path) -> None:
    cluster = Cluster(
        gpu=GPUS["h200"],
        gpus=1,
        model=Model.from_config(_LLAMA_8B),
        weight_bytes=1.0,
        kv_number_bytes=1.0,
    )
    requests = read_trace(path, _TENANTS, _SPEED, None)
    outcome = simulated(requests, cluster, parse_policy(_POLICY), MOONCAKE_BLOCK_TOKENS)
    report.figures |= {
        f"{path.name}: hit rate": outcome.hit_rate,
        f"{path.name}: hit rate of a cache that forgets nothing": outcome.ceiling,
    }
    report.at_most(f"{path.name}: below the ceiling", outcome.ceiling - outcome.hit_rate, _POINT)


def main() -> int:
    """Simulate and return the exit status."""
    parser = arguments("plan", __doc__ or "")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="a Mooncake trace")
    options = parser.parse_args()
    report = Report("Simulated")
    _published(report)
    _rate(report, 1_000 if options.quick else 20_000)
    if options.trace:
        _trace(report, options.trace)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())

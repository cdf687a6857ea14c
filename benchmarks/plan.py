"""What the simulator says, and how far it is from what is published. Nothing here is measured.

The questions: the four published rows of the reference workload, with the error of every cell;
the rate of the simulator itself; and with ``--trace`` how close to a cache that forgets nothing the
tiers of a policy come on a Mooncake trace. With ``--cells`` what was measured by
``benchmarks.rag_chat`` is set beside what is simulated of the same requests, engine by engine.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers.base import BYTES_PER_TOKEN
from benchmarks.rag_chat.cells import Cells
from benchmarks.rag_chat.setting import Setting
from benchmarks.replay import read_trace, simulated
from benchmarks.report import Report, arguments
from sglang_ext.plan.hardware import GPUS, Cluster, Efficiency, Gpu, Model
from sglang_ext.plan.outcome import Outcome, play
from sglang_ext.plan.published import ASSUMPTIONS, ROWS, cluster_72b, errors, simulate_row
from sglang_ext.plan.requests import MOONCAKE_BLOCK_TOKENS, rag_requests
from sglang_ext.plan.tiers import Sizes, TierStack
from sglang_ext.plan.workload import RagShape, RagTraffic, Turn, rag_turns
from sglang_ext.tenancy.loader import parse_policy
from sglang_ext.tenancy.policy import Policy

_MILLION_SECONDS = 300.0
_WORST_P99 = 0.25
"""How far a p99 may be from its published one; it follows from what was fitted to other columns."""
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
_DEMO_MODEL = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
_SMALL_SERVER = Cluster(
    gpu=Gpu(bf16_flops=0.6e12, fp8_flops=0.6e12, memory=20e9, bandwidth=30e9, host_link=5e9),
    gpus=1,
    model=Model.from_config(_DEMO_MODEL),
)
"""About what two cores do. Hit rates hardly depend on it: the loop is closed."""
_TIERS = {
    "SGLang": ("hbm",),
    "ours, one tier": ("hbm",),
    "ours, three tiers": ("hbm", "cpu", "nvme"),
}
_HIT_RATE_BOUND = 0.03
_POLICY = """
version: 1
tiers: {cpu: {size: 256GB}, nvme: {size: 2TB, path: /var/lib/sglang-ext}}
defaults: {quota: {hbm: 100%, cpu: 100%, nvme: 100%}}
tenants: {t0: {api_keys: []}, t1: {api_keys: []}, t2: {api_keys: []}, t3: {api_keys: []}}
"""
"""Tiers of the example policy; nobody has a quota, since the trace has no tenants."""


def _published(report: Report) -> None:
    report.figures["assumed of all rows"] = asdict(ASSUMPTIONS)
    worst = 0.0
    for row in ROWS:
        outcome = simulate_row(row)
        cells = {}
        for name, published, found, error in errors(row, outcome):
            cells[name] = {"published": published, "simulated": found, "error": error}
        worst = max(worst, abs(cells["TTFT p99, ms"]["error"]))
        report.runs.append({"row": row.system, "assumed": asdict(row), "cells": cells})
        for name, cell in cells.items():
            text = f"{cell['published']:g} / {cell['simulated']:.4g} ({cell['error']:+.0%})"
            report.figures[f"{row.system}: {name}, published / simulated"] = text
    report.at_most("TTFT p99 of the published rows, error at worst", worst, _WORST_P99)


def _rate(report: Report, conversations: int) -> None:
    """Simulate three tiers under pressure, and say what a million requests take."""
    turns = rag_turns(RagShape(), RagTraffic(conversations=conversations, tenants=20), 0)
    cluster = cluster_72b(Efficiency())
    tokens = {"hbm": 3_000_000, "cpu": 4_000_000, "nvme": 12_000_000}
    stack = TierStack(Sizes(**tokens, kv_bytes=cluster.kv_bytes, block=_BLOCK))
    start = time.process_time()
    count = len(play(rag_requests(turns, 8.0, _BLOCK), cluster, stack).ttft)
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


def _predicted(report: Report, path: Path) -> None:
    """Set hit rates of the real server beside those that are simulated of the same requests."""
    worst = 0.0
    for run in Cells(path).all():
        if "error" in run or run["engine"] not in _TIERS:
            continue
        measured = run["cached"] / run["prompt"]
        outcome = _simulated_cell(run)
        worst = max(worst, abs(outcome.hit_rate - measured))
        name = f"{run['engine']}, seed {run['seed']}: hit rate, measured / simulated"
        report.figures[name] = f"{measured:.4f} / {outcome.hit_rate:.4f}"
    report.at_most("hit rate, simulated less measured, at worst", worst, _HIT_RATE_BOUND)


def _simulated_cell(run: Mapping[str, Any]) -> Outcome:
    setting, tiers = Setting(**json.loads(run["size"])), _TIERS[run["engine"]]
    budget = setting.budget(())
    tokens = {"hbm": budget.hbm, "cpu": budget.cpu, "nvme": budget.disk // BYTES_PER_TOKEN}
    sizes = Sizes(**{tier: tokens[tier] for tier in tiers}, kv_bytes=BYTES_PER_TOKEN)
    turns = setting.turns(run["seed"])
    policy = None if run["engine"] == "SGLang" else _everybody(turns)
    requests = rag_requests(turns, setting.rate or 1.0, 1)
    clients = None if setting.rate else setting.clients
    return play(requests, _SMALL_SERVER, TierStack(sizes, policy), clients=clients)


def _everybody(turns: Sequence[Turn]) -> Policy:
    """Return the policy of the benchmark: every tenant with all defaults."""
    names = sorted({turn.tenant for turn in turns})
    return parse_policy(
        "version: 1\ntenants:\n" + "".join(f"  {n}: {{api_keys: []}}\n" for n in names)
    )


def main() -> int:
    """Simulate and return the exit status."""
    parser = arguments("plan", __doc__ or "")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="a Mooncake trace")
    parser.add_argument("--cells", type=Path, metavar="FILE", help="of benchmarks.rag_chat")
    options = parser.parse_args()
    report = Report("Simulated")
    _published(report)
    _rate(report, 1_000 if options.quick else 20_000)
    if options.trace:
        _trace(report, options.trace)
    if options.cells:
        _predicted(report, options.cells)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())

"""The four published rows of the reference workload, and the simulator's beside them.

Published: chat over retrieved documents on 8 H200 with a 72B model in FP8; throughput, TTFT p50 and
p99, and the share of prefill recomputed, of four systems. Not published: how many users there were,
how long they paused, how long answers were, how much memory a cache had, and what each system costs
a request besides its kernels. So these are assumptions, the same for all rows but the two that tell
systems apart: how many tokens each keeps (``tokens``), chosen so that the recomputed share fits,
and one number chosen so that TTFT p50 fits. That is the work of an engine's one host process for a
request (``host_seconds``), for which requests queue; where LMCache is added to vLLM the host is
vLLM's, and the number is how fast it loads (``link``), which holds up the whole batch. Throughput
and p99 follow. That is a check of whether one set of assumptions is consistent with all four rows,
not a measurement of any system.

An earlier model gave every request a fixed delay of its own instead, up to 190 of 210 ms. A delay
that nobody waits for has no tail: its p99 came out 22 to 46 % low.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sglang_ext.plan.hardware import GPUS, Cluster, Efficiency, Model
from sglang_ext.plan.outcome import Outcome, play
from sglang_ext.plan.requests import rag_requests
from sglang_ext.plan.tiers import Sizes, TierStack
from sglang_ext.plan.workload import RagShape, RagTraffic, rag_turns

__all__ = [
    "ASSUMPTIONS",
    "CELLS",
    "ROWS",
    "Assumptions",
    "Row",
    "cluster_72b",
    "errors",
    "simulate_row",
]

_QWEN_72B = {
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 29568,
    "vocab_size": 152064,
}

CELLS = ("throughput, tok/s", "TTFT p50, ms", "TTFT p99, ms", "recomputed, %")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published row, and what is assumed of its system alone."""

    system: str
    published: tuple[float, float, float, float]
    tokens: dict[str, int]
    """Tokens of KV that each tier keeps: hbm, cpu, nvme."""
    host_seconds: float
    link: float = 0.8
    """Share of the GPUs' links to host memory that loading reaches."""


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What is assumed of all rows."""

    clients: int
    shape: RagShape
    traffic: RagTraffic
    efficiency: Efficiency
    block: int = 100


def cluster_72b(efficiency: Efficiency) -> Cluster:
    """Return a dense 72B model (Qwen2.5's shape) with FP8 weights and pages on 8 H200."""
    model = Model.from_config(_QWEN_72B)
    return Cluster(
        gpu=GPUS["h200"],
        gpus=8,
        model=model,
        weight_bytes=1.0,
        kv_number_bytes=1.0,
        efficiency=efficiency,
    )


ASSUMPTIONS = Assumptions(
    clients=42,
    shape=RagShape(documents=1),
    traffic=RagTraffic(conversations=600, tenants=20, documents=250, think=300.0, idle=3_000.0),
    efficiency=Efficiency(compute=0.7, memory=0.75, step_seconds=0.002),
)

ROWS = (
    Row(
        system="vLLM, prefix caching",
        published=(2_100, 210, 720, 38),
        tokens={"hbm": 620_000},
        host_seconds=0.0368,
    ),
    Row(
        system="SGLang, RadixAttention",
        published=(2_650, 140, 510, 17),
        tokens={"hbm": 1_450_000},
        host_seconds=0.0405,
    ),
    Row(
        system="vLLM + LMCache, CPU and NVMe",
        published=(2_450, 160, 430, 11),
        tokens={"hbm": 620_000, "cpu": 2_100_000},
        host_seconds=0.0368,
        link=0.0325,
    ),
    Row(
        system="vLLM + LMCache, distributed",
        published=(2_380, 180, 480, 6),
        tokens={"hbm": 620_000, "cpu": 3_000_000},
        host_seconds=0.0368,
        link=0.0255,
    ),
)


def simulate_row(row: Row, assumed: Assumptions = ASSUMPTIONS, seed: int = 0) -> Outcome:
    """Play the reference workload with what is assumed of one system."""
    efficiency = replace(assumed.efficiency, host_seconds=row.host_seconds, link=row.link)
    cluster = cluster_72b(efficiency)
    sizes = Sizes(**row.tokens, kv_bytes=cluster.kv_bytes, block=assumed.block)
    turns = rag_turns(assumed.shape, assumed.traffic, seed)
    draw = random.Random(seed)
    # Answers of one length would end together, and their clients would stay a convoy for ever.
    requests = (
        request._replace(answer=draw.randint(1, 2 * assumed.shape.answer - 1))
        for request in rag_requests(turns, 1.0, assumed.block)
    )
    stack = TierStack(sizes)
    return play(requests, cluster, stack, skip=len(turns) // 2, clients=assumed.clients)


def errors(row: Row, outcome: Outcome) -> Iterator[tuple[str, float, float, float]]:
    """Yield name, published, simulated and relative error of each cell."""
    simulated = (
        outcome.output_rate,
        outcome.ttft_quantile(0.5) * 1e3,
        outcome.ttft_quantile(0.99) * 1e3,
        outcome.recomputed_share * 100,
    )
    for name, published, found in zip(CELLS, row.published, simulated, strict=True):
        yield name, published, found, found / published - 1

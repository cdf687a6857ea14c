"""Plays a public trace against a running server, scaled, or through the simulator.

    python -m benchmarks.replay --trace conversation.jsonl --tenants 4 --simulate \\
        --model config.json --gpu h200 --gpus 8 --policy tenants.yaml
    python -m benchmarks.replay --trace conversation.jsonl --tenants 4 \\
        --server http://127.0.0.1:30000 --block 8 --requests 300 --speed 0.5

Mooncake's traces hold block hashes of 512 tokens and arrivals; on a server a block of ``--block``
tokens, always the same for a hash, takes its place. Azure's hold arrivals and lengths only: their
arrivals and answers are given to the reference workload. Traces have no tenants: a Mooncake request
belongs to the tenant that its second block names (the first is the same nearly everywhere), modulo
``--tenants``, so that what shares more than a system prompt shares a tenant. A server must know the
keys ``key-t0``, ``key-t1`` and so on.

The traces are those of https://github.com/kvcache-ai/Mooncake (FAST25 release) and
https://github.com/Azure/AzurePublicDataset; they are not part of this project.
"""

import argparse
import asyncio
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.engines import Engine
from benchmarks.rag_chat import summary
from benchmarks.rag_chat.load import Load as ServerLoad
from benchmarks.report import Report, arguments
from sglang_ext.plan.hardware import GPUS, Cluster, Model
from sglang_ext.plan.outcome import Outcome, play
from sglang_ext.plan.requests import (
    MOONCAKE_BLOCK_TOKENS,
    PlanRequest,
    azure_requests,
    mooncake_requests,
)
from sglang_ext.plan.sizes import sizes_of
from sglang_ext.plan.tiers import TierStack
from sglang_ext.plan.workload import Piece, RagShape, RagTraffic, Turn, rag_turns
from sglang_ext.tenancy.loader import load_policy
from sglang_ext.tenancy.policy import Policy
from sglang_ext.types import Tier

_RAG_BLOCK_TOKENS = 100


def _options() -> argparse.Namespace:
    parser = arguments("replay", __doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--server", metavar="URL")
    where.add_argument("--simulate", action="store_true")
    parser.add_argument("--tenants", type=int, default=1, metavar="N")
    parser.add_argument("--requests", type=int, metavar="N", help="the first N")
    parser.add_argument("--speed", type=float, default=1.0, help="2: twice as fast")
    parser.add_argument("--block", type=int, default=16, help="tokens a block on the server")
    parser.add_argument("--model", type=Path, metavar="CONFIG", help="config.json")
    parser.add_argument("--gpu", choices=GPUS, default="h200")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--weight-bytes", type=float, default=2.0)
    parser.add_argument("--kv-bytes", type=float, default=2.0, help="of one number")
    parser.add_argument("--policy", type=Path, metavar="FILE")
    return parser.parse_args()


def read_trace(path: Path, tenants: int, speed: float, limit: int | None) -> Iterator[PlanRequest]:
    """Yield the requests of a trace, by its ending: ``.jsonl`` is Mooncake's, ``.csv`` Azure's."""
    if path.suffix == ".csv":
        traffic = RagTraffic(conversations=4_000, tenants=max(1, tenants))
        turns = rag_turns(RagShape(), traffic, 0)
        found = azure_requests(path, turns, _RAG_BLOCK_TOKENS)
    else:
        found = mooncake_requests(path, tenants)
    for request in itertools.islice(found, limit):
        yield request._replace(at=request.at / speed)


def block_tokens(path: Path) -> int:
    """Return how many tokens a block of a trace stands for."""
    return _RAG_BLOCK_TOKENS if path.suffix == ".csv" else MOONCAKE_BLOCK_TOKENS


def as_turns(requests: Iterator[PlanRequest], block: int, original: int) -> list[Turn]:
    """Return requests whose blocks have ``block`` tokens, and answers that are as much shorter.

    Each stands for itself: what came before is in its prompt already.
    """
    return [
        Turn(
            request.at,
            request.tenant,
            number,
            0,
            tuple(Piece(f"block/{name}", block) for name in request.blocks),
            max(1, round(request.answer * block / original)),
        )
        for number, request in enumerate(requests)
    ]


def simulated(
    requests: Iterator[PlanRequest], cluster: Cluster, policy: Policy | None, block: int
) -> Outcome:
    """Play a trace through the simulator, at its own arrivals."""
    stack = TierStack(sizes_of(cluster, policy, block), policy)
    return play(requests, cluster, stack)


def _report_simulated(report: Report, outcome: Outcome) -> None:
    report.figures |= {
        "requests": len(outcome.ttft),
        "hit rate": outcome.hit_rate,
        "hit rate of a cache that forgets nothing": outcome.ceiling,
        **{f"hit rate, {tier}": outcome.hits(tier) for tier in Tier if outcome.hits(tier)},
        "recomputed share": outcome.recomputed_share,
        "TTFT p50, s": outcome.ttft_quantile(0.5),
        "TTFT p99, s": outcome.ttft_quantile(0.99),
        "output tokens/s": outcome.output_rate,
        "busy": outcome.busy(),
    }


def _report_served(report: Report, url: str, turns: Sequence[Turn], seed: int) -> None:
    load = ServerLoad(Engine("server", url, 0, {}), turns, seed)
    seconds = asyncio.run(load.open(1.0))
    run = summary.of_run(load.requests, seconds, 0.0)
    report.at_most("requests that failed", run["failed"], 0)
    skipped = ("ttft", "gaps", "cpu seconds", "cpu ms per computed prompt token")
    report.figures |= {key: value for key, value in run.items() if key not in skipped}
    report.figures |= {
        key: value
        for key, value in summary.of_engine([run | {"seed": seed}]).items()
        if " p" in key
    }


def main() -> int:
    """Replay and return the exit status."""
    options = _options()
    requests = read_trace(options.trace, options.tenants, options.speed, options.requests)
    original = block_tokens(options.trace)
    kind = "simulated" if options.simulate else "served"
    report = Report(f"{options.trace.name}, {kind}")
    if options.simulate:
        policy = load_policy(options.policy) if options.policy else None
        config = json.loads(options.model.read_text("utf-8")) if options.model else None
        if config is None:
            raise SystemExit("--simulate needs --model, the config.json of the model")
        cluster = Cluster(
            gpu=GPUS[options.gpu],
            gpus=options.gpus,
            model=Model.from_config(config),
            weight_bytes=options.weight_bytes,
            kv_number_bytes=options.kv_bytes,
        )
        _report_simulated(report, simulated(requests, cluster, policy, original))
    else:
        turns = as_turns(requests, options.block, original)
        _report_served(report, options.server, turns, options.seed)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())

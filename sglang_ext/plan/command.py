"""The subcommand ``plan`` of ``sglang-ext``: what a cluster would do under a policy."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_ext.console import BAD_INPUT, OK, PLAIN_WIDTH, complain
from sglang_ext.errors import PlanError, PolicyError
from sglang_ext.types import Tier

__all__ = ["add_plan"]

_BYTES = {"bf16": 2.0, "fp8": 1.0}
_GPUS = ("a100", "b200", "h100", "h200", "l40s")


def add_plan(commands: Any) -> None:
    """Add the subcommand to argparse's ``commands``."""
    parser = commands.add_parser(
        "plan", help="simulate a cluster: hits, times, and what another setting would change"
    )
    parser.add_argument("--model", type=Path, metavar="CONFIG", help="config.json")
    parser.add_argument("--gpu", choices=_GPUS, default="h200")
    parser.add_argument("--gpus", type=int, default=8, metavar="N", help="tensor parallelism")
    parser.add_argument("--weights", choices=_BYTES, default="bf16")
    parser.add_argument(
        "--policy", type=Path, metavar="FILE", help="tiers, quotas, TTLs, FP8 pages"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--trace", type=Path, metavar="FILE", help="a Mooncake trace, JSON lines")
    what.add_argument("--workload", choices=["rag"])
    what.add_argument(
        "--usage", type=Path, metavar="FILE", help="of `sglang-ext usage`: what TTL has --tenant?"
    )
    parser.add_argument("--tenant", metavar="NAME", help="of --usage")
    parser.add_argument("--rate", type=float, default=5.0, help="of --workload, requests a second")
    parser.add_argument("--conversations", type=int, default=2_000, help="of --workload")
    parser.add_argument("--seed", type=int, default=0, help="of --workload")
    parser.add_argument("--price", type=float, metavar="P", help="of one GPU for an hour")
    parser.add_argument("--sweep", action="store_true", help="change one setting at a time")
    parser.add_argument(
        "--plot", type=Path, metavar="PNG", help="draw the sweep (needs matplotlib)"
    )
    parser.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> int:
    if options.usage:
        return _ttl(options)
    if options.model is None:
        return complain("--trace and --workload need --model, its config.json", BAD_INPUT)
    # Loads torch and SGLang, which the other commands do not need.
    from sglang_ext.plan.scenario import Scenario, sweep
    from sglang_ext.plan.tables import draw_plot, outcome_tables, sweep_table

    try:
        scenario = Scenario.read(options, _BYTES[options.weights])
        outcome = scenario.outcome()
        lines = sweep(scenario) if options.sweep or options.plot else []
        if options.plot:
            draw_plot(outcome, lines, options.plot)
    except (PlanError, PolicyError, OSError, ValueError) as error:
        return complain(str(error), BAD_INPUT)
    _print(*outcome_tables(scenario, outcome, options.price))
    if lines:
        _print(sweep_table(outcome, lines))
    return OK


def _ttl(options: argparse.Namespace) -> int:
    from sglang_ext.plan.ttl import KEPT, Reuse, advise, read_usage
    from sglang_ext.plan.ttl_tables import policy_line, ttl_tables

    if options.tenant is None or (options.policy and not options.model):
        problem = "--usage needs --tenant, and with --policy also --model: how large is a token?"
        return complain(problem, BAD_INPUT)
    try:
        reuse = Reuse.of(read_usage(options.usage), options.tenant)
        room, now, kv_bytes = _limits(options)
        # As much as it ever sent is no limit.
        advice = advise(reuse, room or dict.fromkeys(KEPT, reuse.uses))
    except (PlanError, PolicyError, OSError, ValueError) as error:
        return complain(str(error), BAD_INPUT)
    _print(*ttl_tables(reuse, advice, now, kv_bytes), policy_line(advice))
    return OK


def _limits(
    options: argparse.Namespace,
) -> tuple[Mapping[Tier, int], Mapping[Tier, float], float | None]:
    """Return what model and policy say of the tenant: tokens it may hold, TTLs, bytes a token."""
    if not options.model:
        return {}, {}, None
    from sglang_ext.plan.scenario import Hardware

    on = Hardware.read(options, _BYTES[options.weights])
    if on.policy is None:
        return {}, {}, on.cluster.kv_bytes
    return on.room(options.tenant), on.ttls(options.tenant), on.cluster.kv_bytes


def _print(*tables: Any) -> None:
    import sys

    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    for table in tables:
        console.print(table)

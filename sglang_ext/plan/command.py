"""The subcommand ``plan`` of ``sglang-ext``: what a cluster would do under a policy."""

import argparse
from pathlib import Path
from typing import Any

from sglang_ext.console import BAD_INPUT, OK, PLAIN_WIDTH, complain
from sglang_ext.errors import PlanError, PolicyError

__all__ = ["add_plan"]

_BYTES = {"bf16": 2.0, "fp8": 1.0}
_GPUS = ("a100", "b200", "h100", "h200", "l40s")


def add_plan(commands: Any) -> None:
    """Add the subcommand to argparse's ``commands``."""
    parser = commands.add_parser(
        "plan", help="simulate a cluster: hits, times, and what another setting would change"
    )
    parser.add_argument("--model", type=Path, required=True, metavar="CONFIG", help="config.json")
    parser.add_argument("--gpu", choices=_GPUS, default="h200")
    parser.add_argument("--gpus", type=int, default=8, metavar="N", help="tensor parallelism")
    parser.add_argument("--weights", choices=_BYTES, default="bf16")
    parser.add_argument(
        "--policy", type=Path, metavar="FILE", help="tiers, quotas, TTLs, FP8 pages"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--trace", type=Path, metavar="FILE", help="a Mooncake trace, JSON lines")
    what.add_argument("--workload", choices=["rag"])
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
    # Loads torch and SGLang, which the other commands do not need.
    from sglang_ext.plan.scenario import Scenario, sweep
    from sglang_ext.plan.tables import draw_plot, outcome_tables, sweep_table

    try:
        scenario = Scenario.read(options, _BYTES[options.weights])
        outcome = scenario.outcome()
        lines = sweep(scenario) if options.sweep or options.plot else []
        if options.plot:
            draw_plot(lines, options.plot)
    except (PlanError, PolicyError, OSError, ValueError) as error:
        return complain(str(error), BAD_INPUT)
    _print(*outcome_tables(scenario, outcome, options.price))
    if lines:
        _print(sweep_table(outcome, lines))
    return OK


def _print(*tables: Any) -> None:
    import sys

    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    for table in tables:
        console.print(table)

"""What is a cache worth to chat over retrieved documents? Ours and its peers, interleaved.

    python -m benchmarks.rag_chat                     # the series: every engine, every seed
    python -m benchmarks.rag_chat --quick             # one seed, a short workload, our engines
    python -m benchmarks.rag_chat --engines "SGLang" "ours, three tiers" --seeds 0 1

The reference workload (``sglang_ext.plan.workload``) with all lengths and budgets times
``--scale``. Seeds are the outer loop: each engine is started, warmed up, measured alone on the
machine and stopped before the next one, and their order turns with each seed. All engines are sent
the same requests in the same order; conversations grow by each engine's own answers. The working
set is at least three times what HBM and host memory hold together.

*Recomputed* are the tokens that a tenant had had computed before, sent again, and had to be
computed again, over all that it had had computed before and sent again: our own count, from token
ids. What was cached is the server's, in ``usage``. A request of which the server counts another
length than we sent has failed, and a bar says whether anything was cached that was never sent.

Every finished cell (engine and seed) is kept in ``--cells`` at once, and not measured again: start
the same command again after it was cut off. A cell that failed is a row with its error, and is
tried again.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.engines import StartError, cpu_seconds
from benchmarks.peers import PEERS, Peer, Running
from benchmarks.peers.environments import InstallError
from benchmarks.rag_chat import summary
from benchmarks.rag_chat.cells import Cell, Cells
from benchmarks.rag_chat.load import Load, Request
from benchmarks.rag_chat.setting import QUICK, REFERENCE, Setting
from benchmarks.rag_chat.table import add_bars, print_table
from benchmarks.report import Report, arguments
from sglang_ext.plan.workload import Piece, Turn, distinct_tokens

_QUICK_ENGINES = ("ours, one tier", "ours, three tiers", "SGLang")


def _options() -> argparse.Namespace:
    parser = arguments("rag_chat", __doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--engines", nargs="+", choices=PEERS, metavar="NAME", help=", ".join(PEERS)
    )
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N")
    parser.add_argument("--scale", type=float, help="of all lengths and budgets, 0.125 by default")
    parser.add_argument("--conversations", type=int, metavar="N")
    parser.add_argument("--clients", type=int, metavar="N", help="of the closed loop")
    parser.add_argument("--rate", type=float, metavar="R", help="open loop, R turns a second")
    cells = Path("build/rag_chat.cells.jsonl")
    parser.add_argument("--cells", type=Path, default=cells, metavar="FILE")
    parser.add_argument("--fresh", action="store_true", help="measure finished cells again")
    parser.add_argument("--only-report", action="store_true", help="measure nothing")
    return parser.parse_args()


def _setting(options: argparse.Namespace) -> Setting:
    setting = QUICK if options.quick else REFERENCE
    given = {name: getattr(options, name) for name in ("scale", "conversations", "clients", "rate")}
    return setting.with_given(given)


def main() -> int:
    """Measure what is missing, report on all, and return the exit status."""
    options = _options()
    setting = _setting(options)
    names = options.engines or (_QUICK_ENGINES if options.quick else list(PEERS))
    seeds = options.seeds or ([0] if options.quick else [0, 1, 2])
    if options.fresh:
        options.cells.unlink(missing_ok=True)
    cells = Cells(options.cells)
    if not options.only_report:
        _series(names, seeds, setting, cells)
    return _report(names, seeds, setting, cells, options)


def _series(names: Sequence[str], seeds: Sequence[int], setting: Setting, cells: Cells) -> None:
    for turn, seed in enumerate(seeds):
        first = turn % len(names)
        turns = setting.turns(seed)
        for name in [*names[first:], *names[:first]]:
            cell = Cell(name, seed, setting.key)
            if not cells.finished(cell):
                cells.add(cell, _measured(PEERS[name], turns, setting, seed))


def _measured(peer: Peer, turns: Sequence[Turn], setting: Setting, seed: int) -> dict[str, Any]:
    """Return the figures of one cell, or the error because of which there are none."""
    print(f"seed {seed}, {peer.name}: starting", file=sys.stderr, flush=True)
    try:
        peer.environment.prepare()
        versions = peer.environment.versions()
        tenants = tuple(sorted({turn.tenant for turn in turns}))
        with (
            tempfile.TemporaryDirectory() as folder,
            peer.start(setting.budget(tenants), Path(folder)) as running,
        ):
            figures = _play(running, turns, setting, seed)
    except (StartError, InstallError, OSError) as error:
        print(f"seed {seed}, {peer.name}: {error}", file=sys.stderr, flush=True)
        return {"error": str(error)}
    if figures["failed"]:
        figures["error"] = (
            f"{figures['failed']} requests failed: {'; '.join(figures['errors'][:3])}"
        )
    _tell(peer.name, seed, figures)
    return {"versions": versions, "working set": distinct_tokens(turns), **figures}


def _play(running: Running, turns: Sequence[Turn], setting: Setting, seed: int) -> dict[str, Any]:
    _warm_up(running, turns, seed)
    with _progress() as bar:
        task = bar.add_task(running.engine.name, total=len(turns))

        def advance(_: Request) -> None:
            bar.advance(task)

        load = Load(running.engine, turns, seed, advance)
        before = cpu_seconds(running.pids)
        if setting.rate:
            seconds = asyncio.run(load.open(setting.rate))
        else:
            seconds = asyncio.run(load.closed(setting.clients))
        cpu = cpu_seconds(running.pids) - before
    return summary.of_run(load.requests, seconds, cpu)


def _warm_up(running: Running, turns: Sequence[Turn], seed: int) -> None:
    """Let an engine compile and measure what it wants to, on texts that do not come again."""
    tenants = sorted({turn.tenant for turn in turns})
    length = sum(piece.tokens for piece in turns[0].new) or 100
    warm = [
        Turn(0.0, tenant, -1 - place, 0, (Piece(f"warm/{tenant}", length),), turns[0].answer)
        for place, tenant in enumerate(tenants)
    ]
    asyncio.run(Load(running.engine, warm, seed).closed(2))


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), transient=True, disable=not sys.stderr.isatty())


def _tell(name: str, seed: int, figures: dict[str, Any]) -> None:
    told = ("seconds", "output tokens/s", "recomputed share", "cpu seconds", "failed")
    line = ", ".join(f"{key} {figures[key]:.3g}" for key in told)
    print(f"seed {seed}, {name}: {line}", file=sys.stderr, flush=True)


def _report(
    names: Sequence[str],
    seeds: Sequence[int],
    setting: Setting,
    cells: Cells,
    options: argparse.Namespace,
) -> int:
    report = Report("RAG chat, all seeds")
    report.figures["setting"] = asdict(setting)
    found = {
        name: [run for run in cells.of(name, setting.key) if run["seed"] in seeds] for name in names
    }
    for name, runs in found.items():
        good = [run for run in runs if "error" not in run]
        report.runs += [_without_times(run) for run in runs]
        error = runs[-1].get("error") if runs else "not measured"
        report.figures[name] = summary.of_engine(good) if good else {"error": error}
    add_bars(report, setting, found)
    print_table(report, names)
    return report.finish(options.json)


def _without_times(run: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in run.items() if key not in ("ttft", "gaps")}


if __name__ == "__main__":
    sys.exit(main())

"""Runs the short version of every benchmark, one after the other, and rewrites the tables.

    python -m benchmarks.short                          # make bench: all of them, under 45 minutes
    python -m benchmarks.short --only bench_tree plan   # some of them

Nothing stops the others: neither a bar that does not hold, nor a script that fails or takes longer
than its limit, which is then interrupted so that its servers end with it. All of that is listed at
the end, and the exit status is 1 then. A short result takes the place of the one in
``benchmarks/results``, and names the full one that it replaced.
"""

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import tables
from benchmarks.report import RESULTS

_ROOT = Path(__file__).parents[1]
_LIMIT_SECONDS = 300
_END_SECONDS = 60
_CELLS = "build/rag_chat.quick.jsonl"
_VLLM = ".venv-peers/vllm/bin/python"


@dataclass(frozen=True)
class Script:
    """A benchmark: its name, what Python is given, and how many seconds it may take."""

    name: str
    words: tuple[str, ...]
    limit: int = _LIMIT_SECONDS


@dataclass(frozen=True)
class Ended:
    """How a script went: ``problems`` is empty where it ran and all its bars hold."""

    name: str
    seconds: float
    problems: list[str] = field(default_factory=list)
    ran: bool = True


def scripts(options: argparse.Namespace) -> Iterator[Script]:
    """Yield all benchmarks in the order they run."""
    more = {
        "bench_engine_cpu": ("--vllm-python", _VLLM) if (_ROOT / _VLLM).exists() else (),
        "bench_fp8_quality": ("--data", str(options.data)) if options.data else (),
    }
    for path in sorted((_ROOT / "benchmarks").glob("bench_*.py")):
        words = (f"benchmarks/{path.name}", "--quick", *more.get(path.stem, ()))
        yield Script(path.stem, words)
    chat = ("-m", "benchmarks.rag_chat", "--quick", "--fresh", "--cells", _CELLS)
    yield Script("rag_chat", chat, 3 * _LIMIT_SECONDS)
    trace = ("--trace", str(options.trace)) if options.trace else ()
    yield Script("plan", ("-m", "benchmarks.plan", "--quick", "--cells", _CELLS, *trace))


def run(script: Script, results: Path = RESULTS) -> Ended:
    """Run one script to its end or its limit; what it prints is seen as it comes."""
    before, start = _written(results), time.monotonic()
    process = subprocess.Popen([sys.executable, *script.words], cwd=_ROOT)
    status = _ended(process, script.limit)
    seconds = time.monotonic() - start
    after = _written(results)
    new = [path for path, moment in after.items() if before.get(path) != moment]
    problems = [problem for path in sorted(new) for problem in _bars(path)]
    if status is None:
        problems.append(f"interrupted after {script.limit} s")
    elif status and not problems:
        problems.append(f"failed with exit status {status}")
    return Ended(script.name, seconds, problems, ran=bool(new))


def _ended(process: "subprocess.Popen[bytes]", limit: int) -> int | None:
    """Wait for the exit status; None: it took too long and was ended."""
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return None


def _written(results: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in results.glob("*.json")}


def _bars(path: Path) -> Iterator[str]:
    for bar in json.loads(path.read_text("utf-8")).get("bars", []):
        if not bar["holds"]:
            sign = "<=" if bar["direction"] == "max" else ">="
            yield f"{bar['name']}: {bar['value']:.4g}, expected {sign} {bar['bound']:g}"


def summary(ended: Sequence[Ended]) -> Table:
    """Return how all went."""
    minutes = sum(one.seconds for one in ended) / 60
    table = Table("benchmark", "seconds", "bars", title=f"All benchmarks, {minutes:.0f} minutes")
    for one in ended:
        fine = "hold" if one.ran else "nothing measured here; see above"
        table.add_row(one.name, f"{one.seconds:.0f}", "\n".join(one.problems) or fine)
    return table


def main() -> int:
    """Run all and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", nargs="+", metavar="NAME", help="bench_tree, rag_chat, plan, ...")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="Mooncake's, for plan")
    parser.add_argument("--data", type=Path, metavar="DIR", help="for bench_fp8_quality")
    options = parser.parse_args()
    found = [each for each in scripts(options) if each.name in (options.only or [each.name])]
    ended = []
    for number, script in enumerate(found, 1):
        print(f"== {script.name} ({number} of {len(found)})", flush=True)
        ended.append(run(script))
    tables.main()
    Console(width=None if sys.stdout.isatty() else 120).print(summary(ended))
    return 1 if any(one.problems for one in ended) else 0


if __name__ == "__main__":
    sys.exit(main())

"""The result file that every benchmark writes, and the table that it prints.

A *figure* is a measured number; a *bar* is a figure with a bound that an issue names. A script ends
with ``sys.exit(report.finish(path))``: 1 when a bar does not hold, so that a regression is seen.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

__all__ = ["Bar", "Report", "Spread", "arguments", "spread"]

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("sglang-ext", "sglang", "torch", "transformers")


@dataclass(frozen=True)
class Bar:
    """One bound: ``value`` must be at most ("max") or at least ("min") ``bound``."""

    name: str
    value: float
    bound: float
    direction: Literal["max", "min"]
    holds: bool


@dataclass(frozen=True)
class Spread:
    """Median and spread of repeated measurements, all in the unit of the input."""

    median: float
    p10: float
    p90: float
    count: int


def spread(values: Sequence[float]) -> Spread:
    """Summarise repeated measurements; needs at least one value."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return Spread(
        median=statistics.median(ordered),
        p10=ordered[round(0.1 * last)],
        p90=ordered[round(0.9 * last)],
        count=len(ordered),
    )


def arguments(name: str, description: str) -> argparse.ArgumentParser:
    """Return the parser every benchmark starts from: ``--json``, ``--quick`` and ``--seed``.

    From here on SIGTERM ends the program as an exception does, so that its servers end with it.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, default=RESULTS / f"{name}.json", metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="a run under a minute")
    parser.add_argument("--seed", type=int, default=0)
    return parser


@dataclass
class Report:
    """Collects runs, figures and bars of one script, then writes and prints them."""

    title: str
    runs: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)

    def at_most(self, name: str, value: float, bound: float) -> None:
        """Add a bar that holds when ``value <= bound``."""
        self.bars.append(Bar(name, value, bound, "max", value <= bound))

    def at_least(self, name: str, value: float, bound: float) -> None:
        """Add a bar that holds when ``value >= bound``."""
        self.bars.append(Bar(name, value, bound, "min", value >= bound))

    def finish(self, path: Path) -> int:
        """Write the JSON file, print the tables and return the exit status."""
        path.parent.mkdir(parents=True, exist_ok=True)
        document = self._document() | _replaces(path)
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        return self.show()

    def show(self) -> int:
        """Print the tables and return the exit status, without keeping anything."""
        console = Console(width=None if sys.stdout.isatty() else 120)
        console.print(self._figures_table())
        if self.bars:
            console.print(self._bars_table())
        return 0 if all(bar.holds for bar in self.bars) else 1

    def _document(self) -> dict[str, Any]:
        return {
            "command": _command(),
            "commit": _commit(),
            "short": _is_short(sys.argv),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": _machine(),
            "versions": _versions(),
            "runs": self.runs,
            "figures": self.figures,
            "bars": [asdict(bar) for bar in self.bars],
        }

    def _figures_table(self) -> Table:
        table = Table(title=self.title)
        table.add_column("figure")
        table.add_column("value", justify="right")
        for name, value in self.figures.items():
            table.add_row(name, _text(value))
        return table

    def _bars_table(self) -> Table:
        table = Table("bar", "value", "bound", "holds", title="Bars")
        for bar in self.bars:
            sign = "<=" if bar.direction == "max" else ">="
            holds = "yes" if bar.holds else "NO"
            table.add_row(bar.name, _text(bar.value), f"{sign} {_text(bar.bound)}", holds)
        return table


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "  ".join(f"{key} {_text(item)}" for key, item in value.items())
    return str(value)


def _command() -> str:
    """Return the command line; of files elsewhere only the names, as they lie elsewhere again."""
    spec = sys.modules["__main__"].__spec__
    script = os.path.relpath(sys.argv[0], Path(__file__).parents[1])
    program = script if spec is None else f"-m {spec.name.removesuffix('.__main__')}"
    given = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    return " ".join(["python", program, *given])


def _is_short(words: Sequence[str]) -> bool:
    return "--quick" in words


def _replaces(path: Path) -> dict[str, Any]:
    """Return what a short result says of the full one whose place it takes."""
    if not _is_short(sys.argv) or not path.exists():
        return {}
    before = json.loads(path.read_text("utf-8"))
    if before.get("short") or _is_short(before["command"].split()):
        return {name: before[name] for name in ("replaces full",) if name in before}
    told = {name: before[name] for name in ("command", "commit", "date")}
    print(f"{path.name}: a short result in place of the full one of {told['commit']}", flush=True)
    return {"replaces full": told}


def _commit() -> str:
    shown = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return shown.stdout.strip() or "unknown"


def _machine() -> dict[str, Any]:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
        "system": platform.system(),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found

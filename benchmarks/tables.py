"""Writes the tables of docs/benchmarks.md from ``benchmarks/results``.

Each table stands between two comments, ``<!-- table NAME -->`` and ``<!-- end -->``; what is there
is replaced. A result that is missing says so, so that no table is older than its file.
"""

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rag_chat.table import HEADER, rows

__all__ = ["fill"]

_ROOT = Path(__file__).parents[1]
_DOCS = _ROOT / "docs" / "benchmarks.md"
_RESULTS = _ROOT / "benchmarks" / "results"
_MARK = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(text: str, results: Path) -> str:
    """Return the document with every table made anew from the files in ``results``."""
    return _MARK.sub(lambda found: found[1] + _section(found[2], results) + found[3], text)


def _section(name: str, results: Path) -> str:
    if name == "bars":
        return _bars(results)
    path = results / f"{name}.json"
    if not path.exists():
        return f"Not measured yet: there is no `{path.name}`.\n"
    found = json.loads(path.read_text("utf-8"))
    return {"rag_chat": _rag_chat, "plan": _plan}[name](found) + _origin(found)


def _rag_chat(found: Mapping[str, Any]) -> str:
    names = [name for name in found["figures"] if name not in ("setting",)]
    versions: dict[str, str] = {}
    for run in found["runs"]:
        versions |= run.get("versions", {})
    table = _table(HEADER, rows(found["figures"], names))
    bars = [(bar["name"], _short(bar["value"]), _bound(bar)) for bar in found["bars"]]
    setting = ", ".join(f"{key} {value}" for key, value in found["figures"]["setting"].items())
    exact = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    lines = [table, _table(("bar", "value", "bound"), bars), f"Setting: {setting}. {exact}.\n"]
    return "\n".join(lines)


def _plan(found: Mapping[str, Any]) -> str:
    cells: list[Sequence[str]] = []
    for run in found["runs"]:
        texts = [
            f"{cell['published']:g} / {_short(cell['simulated'])} ({cell['error']:+.0%})"
            for cell in run["cells"].values()
        ]
        cells.append((run["row"], *texts))
    header = ("system: published / simulated (error)", *found["runs"][0]["cells"])
    bars = [(bar["name"], _short(bar["value"]), _bound(bar)) for bar in found["bars"]]
    predicted = [
        (name.partition(": hit rate")[0], *str(value).split(" / "))
        for name, value in found["figures"].items()
        if "hit rate, measured / simulated" in name
    ]
    tables = [_table(header, cells), _table(("bar", "value", "bound"), bars)]
    if predicted:
        tables.append(_table(("hit rate of", "measured", "simulated"), predicted))
    return "\n".join(tables)


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _bars(results: Path) -> str:
    lines: list[Sequence[str]] = []
    for path in sorted(results.glob("bench_*.json")):
        found = json.loads(path.read_text("utf-8"))
        for bar in found.get("bars", []):
            where = (
                f"`{found['command']}`, {found['date'][:10]}, {found['commit']}{_short_one(found)}"
            )
            lines.append((bar["name"], _short(bar["value"]), _bound(bar), where))
    return _table(("bar", "value", "bound", "command, date, commit"), lines)


def _bound(bar: Mapping[str, Any]) -> str:
    sign = "<=" if bar["direction"] == "max" else ">="
    return f"{sign} {bar['bound']:g}, {'holds' if bar['holds'] else 'does NOT hold'}"


def _origin(found: Mapping[str, Any]) -> str:
    machine = found["machine"]
    where = f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB"
    made = f"{found['date'][:10]}, commit {found['commit']}, {where}{_short_one(found)}"
    return f"\n`{found['command']}`, {made}.\n"


def _short_one(found: Mapping[str, Any]) -> str:
    """Return what is to be said of a short run that took the place of a full one."""
    full = found.get("replaces full")
    return "" if full is None else f"; short, in place of the full run of {full['commit']}"


def _table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---"] * len(header)
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, rule, *lines))


def main() -> int:
    """Rewrite the document."""
    _DOCS.write_text(fill(_DOCS.read_text("utf-8"), _RESULTS), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

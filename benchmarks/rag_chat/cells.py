"""The finished parts of a series, kept as they finish: what was cut off is not lost.

A cell is one engine on one seed. Each is a line of JSON with everything that was measured.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Cell", "Cells"]


@dataclass(frozen=True)
class Cell:
    """What is measured: ``size`` names the workload and budgets, so that series do not mix."""

    engine: str
    seed: int
    size: str


class Cells:
    """The cells of one file. The last line of a cell counts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[Cell, dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text("utf-8").splitlines():
                self._take(line)

    def _take(self, line: str) -> None:
        try:
            result = json.loads(line)
        except ValueError:
            # Cut off while it was written: that cell is measured again.
            return
        self._found[Cell(result["engine"], result["seed"], result["size"])] = result

    def finished(self, cell: Cell) -> bool:
        """Tell whether the cell was measured; one that failed is tried again."""
        return "error" not in self._found.get(cell, {"error": "not measured"})

    def add(self, cell: Cell, result: Mapping[str, Any]) -> None:
        """Keep a result at once."""
        whole = {"engine": cell.engine, "seed": cell.seed, "size": cell.size, **result}
        self._found[cell] = whole
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(whole) + "\n")

    def of(self, engine: str, size: str) -> list[dict[str, Any]]:
        """Return an engine's results of one size, by seed."""
        found = [cell for cell in self._found if (cell.engine, cell.size) == (engine, size)]
        return [self._found[cell] for cell in sorted(found, key=lambda cell: cell.seed)]

    def all(self) -> list[dict[str, Any]]:
        """Return all results."""
        return list(self._found.values())

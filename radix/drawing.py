"""A dump of the tree as text; apart from ``dump``, since a terminal needs no SGLang for it."""

from typing import Any

from sglang_ext.types import PUBLIC

__all__ = ["draw"]


def draw(dumped: dict[str, Any]) -> str:
    """Return a page of a dump as an indented tree, one line a run."""
    lines = [_line(run) for run in dumped["runs"]]
    if dumped["pages"] > 1:
        lines.append(f"page {dumped['page'] + 1} of {dumped['pages']}")
    return "\n".join(lines)


def _line(run: dict[str, Any]) -> str:
    end = run["start"] + run["tokens"]
    marks = [f"{run[word]} {word}" for word in ("hits", "locks", "pins") if run[word]]
    tiers = "+".join(_tier(run, tier) for tier in run["tiers"])
    owner = "public" if run["owner"] == PUBLIC else run["owner"]
    facts = [owner, tiers, f"{run['age_ms'] / 1000:.1f} s ago", *marks]
    return f"{'  ' * run['level']}[{run['start']}, {end}) {' · '.join(facts)}"


def _tier(run: dict[str, Any], tier: str) -> str:
    """Name a tier, and how much of the run it has where that is not all."""
    tokens = run["stored"].get(tier, run["tokens"])
    return tier if tokens == run["tokens"] else f"{tier} ({tokens} of {run['tokens']})"

"""What an attack came to: one finding a row, a table for people, JSON for machines."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

__all__ = ["Finding", "Verdict", "as_document", "as_table", "leaks", "not_run", "verdict_of"]


class Verdict(StrEnum):
    """How one attack ended."""

    PASS = "pass"
    LEAK = "LEAK"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Finding:
    """One row of the table."""

    attack: str
    verdict: Verdict
    detail: str
    figures: Mapping[str, float] = field(default_factory=dict)


def verdict_of(attack: str, problems: Sequence[str], detail: str, **figures: float) -> Finding:
    """Return a leak where there is a problem, else a pass with ``detail``."""
    if problems:
        return Finding(attack, Verdict.LEAK, "; ".join(problems), figures)
    return Finding(attack, Verdict.PASS, detail, figures)


def not_run(attack: str, why: str) -> Finding:
    """Return the row of an attack that could not be made."""
    return Finding(attack, Verdict.NOT_RUN, why)


def leaks(findings: Sequence[Finding]) -> list[str]:
    """Return the attacks that came through."""
    return [finding.attack for finding in findings if finding.verdict is Verdict.LEAK]


def as_document(url: str, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the whole result as plain data."""
    return {
        "url": url,
        "passed": not leaks(findings),
        "findings": [asdict(finding) for finding in findings],
    }


def as_table(findings: Sequence[Finding], *, plain: bool) -> Any:
    """Return a table for ``rich``; ``plain`` without a frame."""
    from rich.box import ROUNDED
    from rich.table import Column, Table

    columns = [Column("attack", overflow="fold"), Column("verdict"), Column("what was seen")]
    table = Table(*columns, box=None if plain else ROUNDED)
    styles = {Verdict.LEAK: "bold red", Verdict.PASS: "green", Verdict.NOT_RUN: "dim"}
    for finding in findings:
        table.add_row(
            finding.attack,
            f"[{styles[finding.verdict]}]{finding.verdict}[/]",
            finding.detail.replace("[", r"\["),
        )
    return table

"""``sglang-ext top``: the overview of a running server as tables in a terminal."""

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

__all__ = ["screen"]

_BLOCKS = "▁▂▃▄▅▆▇█"
_BAR = 24
_SLOW_ROWS = 5
_OWNERS = 3


def screen(now: Mapping[str, Any], before: Mapping[str, Any] | None, *, plain: bool) -> Group:
    """Return what to print of an overview; rates come from the one ``before``.

    ``plain``: without boxes and drawings, for a file or a pipe.
    """
    return Group(_tenants(now, before, plain), _tiers(now, plain), _slow(now, plain))


def _table(title: str, plain: bool, *columns: str) -> Table:
    box = None if plain else SIMPLE_HEAD
    table = Table(title=title, title_justify="left", title_style="bold", box=box)
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number == 0 else "right", no_wrap=True)
    return table


def _tenants(now: Mapping[str, Any], before: Mapping[str, Any] | None, plain: bool) -> Table:
    columns = ["tenant", "requests", "waiting", "hit rate", "TTFT p50", "p99"]
    columns += ["prompt tok/s", "output tok/s", "recomputed"]
    table = _table("Tenants, last 10 minutes", plain, *columns, *([] if plain else ["hits"]))
    old = {row["name"]: row for row in before["tenants"]} if before else {}
    seconds = now["time"] - before["time"] if before else 0.0
    for row in now["tenants"]:
        recent = row["recent"] or {}
        earlier = old.get(row["name"])
        cells = [
            row["name"],
            f"{recent.get('requests', 0)}",
            f"{row['queued']:.0f}",
            _percent(recent.get("hit_rate")),
            _seconds(recent.get("ttft_p50")),
            _seconds(recent.get("ttft_p99")),
            _rate(_prompt(row), _prompt(earlier), seconds),
            _rate(row["output"], earlier and earlier["output"], seconds),
            f"{row['recomputed']:,.0f}",
        ]
        table.add_row(*cells, *([] if plain else [_spark(recent.get("hit_rates", []))]))
    return table


def _tiers(now: Mapping[str, Any], plain: bool) -> Table:
    table = _table("Tiers, tokens", plain, "tier", "held", "of", "full", "largest owners")
    for tier in now["tiers"]:
        held = sum(tier["held"].values())
        part = held / tier["capacity"] if tier["capacity"] else 0.0
        full = _percent(part) if plain else f"{_bar(part)} {_percent(part)}"
        owners = sorted(tier["held"].items(), key=lambda row: -row[1])[:_OWNERS]
        names = ", ".join(f"{name} {tokens:,.0f}" for name, tokens in owners if tokens)
        table.add_row(tier["name"], f"{held:,.0f}", f"{tier['capacity']:,.0f}", full, names)
    return table


def _slow(now: Mapping[str, Any], plain: bool) -> Table:
    table = _table(
        "Slowest, last 10 minutes", plain, "tenant", "TTFT", "total", "prompt", "cached", "output"
    )
    for row in now["slow"][:_SLOW_ROWS]:
        numbers = (row["prompt"], sum(row["cached"].values()), row["output"])
        times = (_seconds(row["ttft"]), _seconds(row["seconds"]))
        table.add_row(row["tenant"], *times, *(f"{number:,}" for number in numbers))
    return table


def _prompt(row: Mapping[str, Any] | None) -> float | None:
    return None if row is None else sum(row["prompt"].values())


def _rate(now: float | None, before: float | None, seconds: float) -> str:
    if now is None or before is None or seconds <= 0:
        return "-"
    return f"{max(now - before, 0) / seconds:,.0f}"


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{part:.1%}"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:,.0f} ms" if seconds < 10 else f"{seconds:,.1f} s"


def _bar(part: float) -> Text:
    full = round(min(max(part, 0.0), 1.0) * _BAR)
    style = "red" if part > 0.9 else "green"
    return Text.assemble(("█" * full, style), ("░" * (_BAR - full), "dim"))


def _spark(rates: list[float | None]) -> str:
    """Return the later half of the hit rates as blocks, with a gap where nothing could hit."""
    shown = rates[len(rates) // 2 :]
    return "".join(
        " " if rate is None else _BLOCKS[min(int(rate * len(_BLOCKS)), len(_BLOCKS) - 1)]
        for rate in shown
    )

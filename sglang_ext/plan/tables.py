"""The planner's answers as tables and as a picture."""

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from sglang_ext.errors import PlanError
from sglang_ext.plan.outcome import Outcome
from sglang_ext.plan.scenario import Change, Scenario
from sglang_ext.types import Tier

__all__ = ["draw_plot", "outcome_tables", "sweep_table"]

_BAR = 40
_HOUR = 3600


def outcome_tables(scenario: Scenario, outcome: Outcome, price: float | None) -> list[Table]:
    """Return what a cluster would do, in all and by tenant. ``price``: of one GPU for an hour."""
    table = Table("simulated", "value", title="Plan")
    for name, value in _rows(scenario, outcome, price):
        table.add_row(name, value)
    return [table, _by_tenant(outcome)]


def _rows(scenario: Scenario, outcome: Outcome, price: float | None) -> list[tuple[str, str]]:
    sizes = scenario.sizes
    context = outcome.prompt.total() / max(1, len(outcome.ttft))
    rows = [
        ("requests", f"{len(outcome.ttft):,}"),
        ("KV of one token", f"{scenario.cluster.kv_bytes:,.0f} bytes"),
        *(
            (f"sessions of {context:,.0f} tokens that fit {tier}", f"{tokens / context:,.0f}")
            for tier, tokens in (("hbm", sizes.hbm), ("cpu", sizes.cpu), ("nvme", sizes.nvme))
            if tokens
        ),
        ("hit rate", f"{outcome.hit_rate:.1%} (at most {outcome.ceiling:.1%})"),
        *(
            (f"hit rate, {tier}", f"{outcome.hits(tier):.1%}")
            for tier in Tier
            if outcome.hits(tier)
        ),
        ("recomputed", f"{outcome.recomputed_share:.1%}"),
        ("TTFT p50 / p99", f"{_ms(outcome, 0.5)} / {_ms(outcome, 0.99)} ms"),
        ("output tokens/s", f"{outcome.output_rate:,.0f}"),
        *((name, f"{share:.0%} of the time") for name, share in outcome.busy().items()),
        ("binds first", outcome.binds),
    ]
    if price is not None and outcome.output_rate:
        million = price * scenario.cluster.gpus / (outcome.output_rate * _HOUR) * 1e6
        rows.append(("price of a million output tokens at this load", f"{million:,.2f}"))
    return rows


def _by_tenant(outcome: Outcome) -> Table:
    table = Table("tenant", "prompt tokens", *(f"from {tier}" for tier in Tier), "recomputed")
    for tenant, prompt in outcome.prompt.most_common():
        hits = [f"{outcome.hits(tier, tenant):.1%}" for tier in Tier]
        again = outcome.recomputed[tenant] / max(1, outcome.known[tenant])
        table.add_row(tenant, f"{prompt:,}", *hits, f"{again:.1%}")
    return table


def sweep_table(base: Outcome, changes: Sequence[Change]) -> Table:
    """Return a line for each change, with a bar for the share recomputed."""
    title = f"One setting changed at a time (as it is: {base.recomputed_share:.1%} recomputed)"
    table = Table("setting", "value", "hit rate", "TTFT p50", "p99", "recomputed", "", title=title)
    most = max([0.01, *(change.outcome.recomputed_share for change in changes)])
    for change in changes:
        outcome = change.outcome
        share = outcome.recomputed_share
        table.add_row(
            change.setting,
            change.value,
            f"{outcome.hit_rate:.1%}",
            f"{_ms(outcome, 0.5)} ms",
            f"{_ms(outcome, 0.99)} ms",
            f"{share:.1%}",
            "█" * round(_BAR * share / most),
        )
    return table


def draw_plot(base: Outcome, changes: Sequence[Change], path: Path) -> None:
    """Draw the share recomputed of every change, and ``base`` as a line beside them.

    Raises PlanError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlanError("--plot needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(9, 0.3 * len(changes) + 1.5), layout="constrained")
    axes = figure.subplots()
    labels = [f"{change.setting} {change.value}" for change in changes]
    shares = [100 * change.outcome.recomputed_share for change in changes]
    axes.bar_label(axes.barh(labels, shares), fmt="%.1f", padding=3)
    axes.axvline(100 * base.recomputed_share, color="gray", linestyle="--", label="as it is")
    axes.legend(loc="lower right")
    # Room for the numbers, and an axis from 0 on where nothing is recomputed at all.
    axes.set_xlim(0, 1.15 * max(1.0, 100 * base.recomputed_share, *shares))
    axes.invert_yaxis()
    axes.set_xlabel("recomputed, % of what was known (simulated)")
    figure.savefig(path)


def _ms(outcome: Outcome, share: float) -> str:
    return f"{outcome.ttft_quantile(share) * 1e3:,.0f}"

"""A tenant's TTLs as tables, and as the line of the policy file."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from sglang_ext.observe.reuse import BOUNDS
from sglang_ext.plan.ttl import Advice, Reuse
from sglang_ext.types import Tier

__all__ = ["as_duration", "policy_line", "ttl_tables"]

_UNITS = (("d", 86_400), ("h", 3_600), ("m", 60))


def as_duration(seconds: float) -> str:
    """Return seconds as the policy file writes them: 300 is ``5m``."""
    for unit, size in _UNITS:
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:g}s"


def policy_line(advice: Sequence[Advice]) -> str:
    """Return what to write under the tenant in the policy file."""
    return f"ttl: {{{', '.join(f'{one.tier}: {as_duration(one.ttl)}' for one in advice)}}}"


def ttl_tables(
    reuse: Reuse, advice: Sequence[Advice], now: Mapping[Tier, float], kv_bytes: float | None
) -> list[Table]:
    """Return the advice and what it rests on.

    ``now`` are the TTLs in force, in seconds, where they are known; ``kv_bytes`` those of a token.
    """
    title = f"TTL of {reuse.tenant}, from {reuse.seconds / 3600:g} hours of its usage"
    best = Table("tier", "ttl", "hits kept", "holds about", "why", "now", title=title)
    for one in advice:
        present = now.get(one.tier)
        was = "" if present is None else f"{as_duration(present)} keeps {reuse.kept(present):.1%}"
        best.add_row(
            str(one.tier), as_duration(one.ttl), *_worth(reuse, one.ttl, kv_bytes), one.reason, was
        )
    share = reuse.reused / max(1, reuse.uses)
    title = f"{reuse.reused:,} tokens came back, {share:.1%} of {reuse.uses:,} sent and written"
    rests = Table("came back within", "hits kept", "a TTL of it holds about", title=title)
    for bound in BOUNDS:
        rests.add_row(as_duration(bound), *_worth(reuse, bound, kv_bytes))
    return [best, rests]


def _worth(reuse: Reuse, ttl: int, kv_bytes: float | None) -> tuple[str, str]:
    held = reuse.held(ttl)
    size = "" if kv_bytes is None else f", {held * kv_bytes / 1e9:,.3g} GB"
    return f"{reuse.kept(ttl):.1%}", f"{held:,.0f} tokens{size}"

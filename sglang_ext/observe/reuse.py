"""How long text lay idle before a tenant sent it again: what a TTL would have kept.

A histogram of fixed size by tenant, in tokens, filled from the times that ``observe.ghosts``
remembers. It counts what came back whether or not it was still cached, so it does not depend on the
TTLs that were in force.
"""

from collections.abc import Mapping

import numpy as np

__all__ = ["BOUNDS", "COLUMNS", "REUSED", "column", "reuse"]

BOUNDS = (
    *(10, 30, 60, 300, 600, 1_800),
    *(3_600, 7_200, 21_600, 43_200),
    *(86_400, 259_200, 604_800, 2_592_000),
)
"""Seconds, up to 30 days: the TTLs that a histogram can tell apart."""

REUSED = "reused_tokens"
"""Prompt tokens that the tenant had sent before, however long ago."""


def column(bound: int) -> str:
    """Return the name of the amount of tokens that lay idle for at most ``bound`` seconds."""
    return f"reused_within_{bound}s_tokens"


COLUMNS = (REUSED, *map(column, BOUNDS))
"""The amounts of usage; each counts those before it too, as buckets of Prometheus do."""


def reuse(idle: "np.ndarray", page_size: int) -> Mapping[str, int]:
    """Return the amounts for pages that came back after ``idle`` whole seconds each. O(pages)."""
    if not len(idle):
        return {}
    pages = np.bincount(np.searchsorted(BOUNDS, idle), minlength=len(BOUNDS) + 1)
    tokens = np.cumsum(pages) * page_size
    within = {column(bound): int(sum) for bound, sum in zip(BOUNDS, tokens[:-1], strict=True)}
    return {REUSED: int(tokens[-1])} | {name: sum for name, sum in within.items() if sum}

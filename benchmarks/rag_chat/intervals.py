"""Percentiles with intervals that assume no distribution."""

from collections.abc import Sequence
from math import ceil, floor, sqrt
from typing import NamedTuple

__all__ = ["Estimate", "percentile"]

_Z = 1.96
"""95 %."""


class Estimate(NamedTuple):
    """A value, and the bounds between which it lies with 95 % confidence."""

    value: float
    low: float
    high: float


def percentile(values: Sequence[float], share: float) -> Estimate:
    """Return the ``share`` quantile of the population that ``values``, at least one, come from.

    The value is the smallest one that at least ``share`` of the sample does not exceed. Bounds are
    order statistics: the number of values below the true quantile is binomial, here taken as
    normal. Where the sample is too small to bound it, the bound is its smallest or largest value.
    """
    ordered = sorted(values)
    count = len(ordered)
    width = _Z * sqrt(count * share * (1 - share))
    place = ceil(count * share) - 1
    low, high = floor(count * share - width) - 1, ceil(count * share + width) - 1

    def at(index: int) -> float:
        return ordered[min(max(index, 0), count - 1)]

    return Estimate(at(place), at(low), at(high))

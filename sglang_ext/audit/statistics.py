"""How well two samples of times can be told apart. No SGLang, no HTTP: numbers only."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

__all__ = ["AucInterval", "auc", "auc_interval", "bootstrap_interval"]

_RESAMPLES = 4000


@dataclass(frozen=True)
class AucInterval:
    """AUC with its confidence interval; 0.5 means that the samples cannot be told apart."""

    auc: float
    low: float
    high: float

    @property
    def tells(self) -> bool:
        """Whether 0.5 lies outside of the interval."""
        return not self.low <= 0.5 <= self.high


def auc(slow: Sequence[float], fast: Sequence[float]) -> float:
    """Return the probability that a value of ``slow`` exceeds one of ``fast``, ties half.

    The area under the ROC curve, by ranks (Mann and Whitney 1947). O(n log n).
    """
    return float(_auc_of_rows(np.asarray([slow], float), np.asarray([fast], float))[0])


def auc_interval(slow: Sequence[float], fast: Sequence[float], level: float = 0.95) -> AucInterval:
    """Return the AUC with the interval of Hanley and McNeil (Radiology 143, 1982).

    Its standard error needs no assumption about the distribution of the times beyond that of the
    exponential family.
    """
    area = auc(slow, fast)
    half = NormalDist().inv_cdf(0.5 + level / 2) * _standard_error(area, len(slow), len(fast))
    return AucInterval(area, area - half, area + half)


def bootstrap_interval(
    slow: Sequence[float], fast: Sequence[float], level: float = 0.999, seed: int = 0
) -> AucInterval:
    """Return the AUC of paired samples with its bootstrap interval (percentiles).

    ``slow[i]`` and ``fast[i]`` were measured next to each other and are drawn together, so that a
    machine that slowed down in between widens the interval as it should. Percentiles of few pairs
    are too narrow, above all near 0 and 1, so that it is never narrower than what chance alone
    gives two equal samples (Mann and Whitney's variance, ``(n + m + 1) / 12nm``). Fewer than 8
    pairs therefore never tell anything at 99.9 %. O(4000 * n log n).
    """
    if len(slow) != len(fast) or not slow:
        raise ValueError(f"found {len(slow)} and {len(fast)} times, expected as many, and some")
    pairs = np.asarray([slow, fast], float)
    draws = np.random.default_rng(seed).integers(0, len(slow), (_RESAMPLES, len(slow)))
    areas = _auc_of_rows(pairs[0][draws], pairs[1][draws])
    tail = (1 - level) / 2
    low, high = np.quantile(areas, [tail, 1 - tail])
    area, count = auc(slow, fast), len(slow)
    half = NormalDist().inv_cdf(1 - tail) * math.sqrt((2 * count + 1) / (12 * count * count))
    return AucInterval(
        area, max(0.0, min(float(low), area - half)), min(1.0, max(float(high), area + half))
    )


def _auc_of_rows(slow: np.ndarray, fast: np.ndarray) -> np.ndarray:
    """Return the AUC of each pair of rows."""
    both = np.concatenate((slow, fast), axis=1)
    ranks = _mean_ranks(both)[:, : slow.shape[1]].sum(axis=1)
    n, m = slow.shape[1], fast.shape[1]
    wins: np.ndarray = (ranks - n * (n + 1) / 2) / (n * m)
    return wins


def _mean_ranks(rows: np.ndarray) -> np.ndarray:
    """Return the rank of each value in its row, from 1; equal values share the mean of theirs."""
    order = np.argsort(rows, axis=1, kind="stable")
    ordered = np.take_along_axis(rows, order, axis=1)
    places = np.arange(rows.shape[1])
    new = np.ones(rows.shape, bool)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    first = np.maximum.accumulate(np.where(new, places, 0), axis=1)
    ends = np.ones(rows.shape, bool)
    ends[:, :-1] = new[:, 1:]
    last = np.minimum.accumulate(np.where(ends, places, rows.shape[1])[:, ::-1], axis=1)[:, ::-1]
    ranks = np.empty(rows.shape)
    np.put_along_axis(ranks, order, (first + last) / 2 + 1, axis=1)
    return ranks


def _standard_error(area: float, slow: int, fast: int) -> float:
    q1 = area / (2 - area)
    q2 = 2 * area**2 / (1 + area)
    variance = area * (1 - area) + (slow - 1) * (q1 - area**2) + (fast - 1) * (q2 - area**2)
    return math.sqrt(max(variance, 0.0) / (slow * fast))

"""How well one can tell two samples of times apart: the area under the ROC curve."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

__all__ = ["AucInterval", "auc_interval"]


@dataclass(frozen=True)
class AucInterval:
    """AUC with its confidence interval; 0.5 means that the samples cannot be told apart."""

    auc: float
    low: float
    high: float


def auc_interval(slow: Sequence[float], fast: Sequence[float], level: float = 0.95) -> AucInterval:
    """Return the probability that a value of ``slow`` exceeds one of ``fast``, ties half.

    The interval is Hanley and McNeil's (Radiology 143, 1982), whose standard error needs no
    assumption about the distribution of the times beyond that of the exponential family.
    O(len(slow) * len(fast)).
    """
    wins = sum((s > f) + 0.5 * (s == f) for s in slow for f in fast)
    auc = wins / (len(slow) * len(fast))
    half = NormalDist().inv_cdf(0.5 + level / 2) * _standard_error(auc, len(slow), len(fast))
    return AucInterval(auc, auc - half, auc + half)


def _standard_error(auc: float, slow: int, fast: int) -> float:
    q1 = auc / (2 - auc)
    q2 = 2 * auc**2 / (1 + auc)
    variance = auc * (1 - auc) + (slow - 1) * (q1 - auc**2) + (fast - 1) * (q2 - auc**2)
    return math.sqrt(variance / (slow * fast))

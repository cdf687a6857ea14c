"""The numbers behind the verdict, against definitions and against chance."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.audit.statistics import AucInterval, auc, auc_interval, bootstrap_interval

TIMES = st.lists(st.integers(0, 9).map(float), min_size=1, max_size=12)


@given(TIMES, TIMES)
def test_the_area_is_the_share_of_pairs_that_are_in_order(
    slow: list[float], fast: list[float]
) -> None:
    wins = sum((s > f) + 0.5 * (s == f) for s in slow for f in fast)
    assert auc(slow, fast) == pytest.approx(wins / (len(slow) * len(fast)))
    assert auc(slow, fast) + auc(fast, slow) == pytest.approx(1)


@given(TIMES, TIMES, st.sampled_from([0.9, 0.95, 0.999]))
def test_an_interval_holds_its_area(slow: list[float], fast: list[float], level: float) -> None:
    size = min(len(slow), len(fast))
    for found in (
        auc_interval(slow, fast, level),
        bootstrap_interval(slow[:size], fast[:size], level),
    ):
        assert found.low <= found.auc + 1e-9
        assert found.high >= found.auc - 1e-9


def samples(random: Random, shift: float, count: int = 40) -> tuple[list[float], list[float]]:
    """Return slow and fast times of a machine whose speed drifts."""
    slow, fast = [], []
    for _ in range(count):
        drift = random.uniform(0.5, 2)
        slow.append(drift * random.gauss(1 + shift, 0.2))
        fast.append(drift * random.gauss(1, 0.2))
    return slow, fast


def test_equal_times_are_rarely_told_apart() -> None:
    """Of 300 honest runs at 99.9 %, fewer than 4 may be wrong (chance of more: 1 in 4000)."""
    random = Random(1)
    wrong = sum(bootstrap_interval(*samples(random, 0)).tells for _ in range(300))
    assert wrong < 4


def test_a_difference_is_seen() -> None:
    random = Random(2)
    found = [bootstrap_interval(*samples(random, 1.0)) for _ in range(20)]
    assert all(one.tells and one.low > 0.5 for one in found)


def test_either_way_round_tells() -> None:
    slow, fast = samples(Random(3), 1.0)
    assert bootstrap_interval(fast, slow).tells
    assert bootstrap_interval(fast, slow).high < 0.5


def test_the_same_samples_give_the_same_interval() -> None:
    slow, fast = samples(Random(4), 0.3)
    assert bootstrap_interval(slow, fast) == bootstrap_interval(slow, fast)


def test_a_few_pairs_tell_nothing_however_far_apart() -> None:
    """Six against six are in perfect order once in 462 times by chance alone."""
    assert not bootstrap_interval([2.0] * 6, [1.0] * 6).tells
    assert bootstrap_interval([2.0] * 12, [1.0] * 12).tells


@pytest.mark.parametrize(("slow", "fast"), [([], []), ([1.0], [1.0, 2.0])])
def test_samples_that_are_no_pairs_are_refused(slow: list[float], fast: list[float]) -> None:
    with pytest.raises(ValueError, match="expected as many"):
        bootstrap_interval(slow, fast)


def test_the_bounds_count_as_inside() -> None:
    assert not AucInterval(0.6, 0.5, 0.7).tells
    assert AucInterval(0.6, 0.501, 0.7).tells

"""Load or recompute: measured times decide, and go on being measured."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.tiering.worth import NEVER, Choice, Line, LoadOrCompute
from sglang_ext.types import Tier

seconds = st.floats(1e-6, 1e-2)


def told(compute: float, cpu: tuple[float, float], nvme: tuple[float, float]) -> LoadOrCompute:
    """Return one that measured these lines; each load is (fixed, per token)."""
    worth = LoadOrCompute(256)
    draw = random.Random(0)
    for _ in range(100):
        tokens = draw.randrange(64, 4096)
        worth.computed(tokens, 0.01 + compute * tokens)
        worth.loaded(Tier.CPU, tokens, cpu[0] + cpu[1] * tokens)
        worth.loaded(Tier.NVME, tokens, nvme[0] + nvme[1] * tokens)
    worth.agree(worth.proposal())
    return worth


@given(seconds, seconds, seconds, seconds, seconds)
def test_loading_is_chosen_exactly_where_it_is_quicker(
    compute: float, cpu_fixed: float, cpu: float, nvme_fixed: float, nvme: float
) -> None:
    """Both ways up count for a page on disk; a tie within a hundredth may go either way."""
    worth = told(compute, (cpu_fixed, cpu), (nvme_fixed, nvme))
    fixed, slope = cpu_fixed + nvme_fixed, cpu + nvme
    for tokens in (1, 10, 100, 1000, 10_000, 100_000):
        load, again = fixed + slope * tokens, compute * tokens
        if abs(load - again) > 0.01 * max(load, again):
            quicker = Choice.LOAD if load < again else Choice.RECOMPUTE
            chosen = Choice.LOAD if tokens >= worth.least[Tier.NVME] else Choice.RECOMPUTE
            assert chosen is quicker, (tokens, worth.least)


def test_before_anything_is_measured_only_long_fetches_are_made() -> None:
    worth = LoadOrCompute(256)
    worth.agree(worth.proposal())
    assert worth.choose(Tier.NVME, 255) is Choice.RECOMPUTE
    assert worth.choose(Tier.NVME, 256) is Choice.LOAD
    assert worth.choose(Tier.CPU, 1) is Choice.LOAD
    assert worth.patience(1000) is None


def test_everything_is_loaded_where_the_operator_wants_that() -> None:
    worth = told(1e-5, (1e-4, 1e-6), (0.01, 1e-3))
    assert worth.patience(1000) is not None
    worth.always = True
    assert all(worth.choose(tier, 1) is Choice.LOAD for tier in (Tier.CPU, Tier.NVME))
    assert worth.patience(1000) is None


def test_a_slow_disk_is_left_alone_and_tried_again_when_it_may_have_changed() -> None:
    worth = told(1e-5, (1e-4, 1e-6), (0.01, 1e-3))
    assert worth.least[Tier.NVME] == NEVER
    chosen = [worth.choose(Tier.NVME, 4000) for _ in range(64)]
    assert chosen.count(Choice.LOAD) == 2
    for _ in range(100):
        worth.loaded(Tier.NVME, 4000, 0.001)
    worth.agree(worth.proposal())
    assert worth.choose(Tier.NVME, 4000) is Choice.LOAD


def test_patience_is_the_time_of_computing() -> None:
    worth = told(1e-3, (0, 1e-6), (0, 1e-6))
    assert worth.patience(500) == pytest.approx(0.5, rel=0.01)


def test_the_slowest_rank_decides_for_all() -> None:
    fast, slow = told(1e-3, (0, 1e-6), (0.001, 1e-5)), told(1e-3, (0, 1e-6), (0.1, 1e-5))
    greatest = [max(pair) for pair in zip(fast.proposal(), slow.proposal(), strict=True)]
    for rank in (fast, slow):
        rank.agree(greatest)
        assert rank.least[Tier.NVME] == pytest.approx(101, abs=2)


@given(st.lists(st.tuples(st.integers(1, 10**5), st.floats(0, 10)), min_size=1, max_size=50))
def test_a_line_never_promises_negative_time(measured: list[tuple[int, float]]) -> None:
    line = Line()
    for tokens, taken in measured:
        line.measured(tokens, taken)
        assert line.per_token >= 0
        assert line.fixed >= 0


def test_a_line_follows_what_changes() -> None:
    line = Line()
    draw = random.Random(1)
    for slope in (1e-3, 1e-5):
        for _ in range(120):
            tokens = draw.randrange(100, 5000)
            line.measured(tokens, 0.02 + slope * tokens)
        assert line.per_token == pytest.approx(slope, rel=0.05)
        assert line.fixed == pytest.approx(0.02, rel=0.1)

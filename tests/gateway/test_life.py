"""Started, ended and started again, later each time, until it has served for a while."""

from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.gateway.life import Life, State


def served(life: Life, now: float, seconds: float) -> float:
    life.started()
    life.became_ready(now)
    life.ended(now + seconds)
    return life.again_at - (now + seconds)


def test_an_engine_that_never_served_is_not_tried_again() -> None:
    life = Life()
    life.started()
    assert life.state is State.STARTING
    life.ended(5.0)
    assert life.state is State.FAILED


def test_the_wait_doubles_and_begins_anew_after_a_minute_of_service() -> None:
    life = Life()
    waits = [served(life, 100.0 * turn, 1.0) for turn in range(9)]
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert life.restarts == 8
    assert served(life, 5000.0, 61.0) == 0.5


def test_a_restart_that_does_not_come_up_is_tried_again() -> None:
    life = Life()
    served(life, 0.0, 1.0)
    life.started()
    life.ended(10.0)
    assert life.state is State.WAITING
    assert life.again_at == 11.0


@given(st.lists(st.integers(0, 300), max_size=40))
def test_no_wait_is_long_enough_to_be_late(services: list[int]) -> None:
    """Back within a minute: what an engine takes to start comes on top of the wait."""
    life, now = Life(), 0.0
    for seconds in services:
        wait = served(life, now, seconds)
        assert 0.5 <= wait <= 30
        now = life.again_at

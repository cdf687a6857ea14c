"""Who may ask a store that did not answer, and when."""

from sglang_ext.tiering.remote_breaker import Breaker


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_after_a_failure_nobody_asks_for_a_while_and_then_one() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    assert breaker.allows() and breaker.is_closed
    breaker.failed("gone")
    assert not breaker.allows() and not breaker.is_closed
    clock.now += 0.51
    assert [breaker.allows() for _ in range(3)] == [True, False, False]
    breaker.worked()
    assert breaker.allows() and breaker.is_closed


def test_the_pause_doubles_up_to_half_a_minute() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    pauses = []
    for _ in range(9):
        breaker.failed("gone")
        began = clock.now
        while not breaker.allows():
            clock.now += 0.125
        pauses.append(clock.now - began)
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_failures_of_one_moment_count_once() -> None:
    """Threads that had asked already find out one after the other."""
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(5):
        breaker.failed("gone")
    clock.now += 0.51
    assert breaker.allows()


def test_one_who_tries_and_never_returns_keeps_nobody_for_ever() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    breaker.failed("gone")
    clock.now += 0.51
    assert breaker.allows() and not breaker.allows()
    clock.now += 0.51
    assert breaker.allows()

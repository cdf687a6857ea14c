"""How often a wrong key may come from one address, against a list of every failure."""

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.tenancy.throttle import FailedKeys

_BURST, _EACH = 3, 10.0


class _Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class _Naive:
    """A bucket that is emptied drop by drop."""

    def __init__(self) -> None:
        self.level = 0.0
        self.last = 1000.0

    def failed(self, now: float) -> bool:
        self.level = max(0.0, self.level - (now - self.last) / _EACH)
        self.last = now
        if self.level > _BURST - 1 + 1e-9:
            return False
        self.level += 1
        return True


def _throttle(clock: _Clock, most_clients: int = 100) -> FailedKeys:
    return FailedKeys(_BURST, _EACH, most_clients, clock)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["10.0.0.1", "10.0.0.2", "x"]), st.integers(0, 12))))
def test_the_bucket_of_each_address(failures: list[tuple[str, int]]) -> None:
    clock, naive = _Clock(), defaultdict[str, _Naive](_Naive)
    throttle = _throttle(clock)
    for client, later in failures:
        clock.now += later
        assert (throttle.failed(client) == 0) == naive[client].failed(clock.now)


@settings(deadline=None)
@given(st.integers(_BURST + 1, 40), st.integers(1, 9))
def test_after_the_wait_the_next_one_may_come_and_not_before(tries: int, early: int) -> None:
    clock = _Clock()
    throttle = _throttle(clock)
    wait = [throttle.failed("10.0.0.1") for _ in range(tries)][-1]
    assert wait == _EACH
    clock.now += _EACH - early
    assert throttle.failed("10.0.0.1") == early
    clock.now += early
    assert throttle.failed("10.0.0.1") == 0


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2001:db8::1", "2001:db8::ffff", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("", "", True),
        ("testclient", "other", False),
    ],
)
def test_what_counts_as_one_client(one: str, other: str, same: bool) -> None:
    throttle = _throttle(_Clock())
    for _ in range(_BURST):
        assert throttle.failed(one) == 0
    assert (throttle.failed(other) > 0) == same


def test_memory_is_bounded_and_the_longest_silent_is_forgotten() -> None:
    throttle = _throttle(_Clock(), most_clients=2)
    for client in ("a", "b"):
        while not throttle.failed(client):
            pass
    assert throttle.failed("a") > 0
    assert throttle.failed("c") == 0
    assert throttle.failed("a") > 0
    assert throttle.failed("b") == 0

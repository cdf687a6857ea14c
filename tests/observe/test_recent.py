"""What the last ten minutes say, with a clock of the test's own."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.metrics import FinishedRequest
from sglang_ext.observe.recent import BIN_SECONDS, WINDOW_SECONDS, RecentRequests


class _Clock:
    now = 10_000.0

    def __call__(self) -> float:
        return self.now


def _request(tenant: str = "a", **fields: Any) -> FinishedRequest:
    given_fields = {"prompt": 33, "output": 2, "cached": {}, "seconds": 1.0, "first_token": 0.5}
    return FinishedRequest(tenant=tenant, **{**given_fields, **fields})


def _recent() -> tuple[RecentRequests, _Clock]:
    clock = _Clock()
    return RecentRequests(lambda: 16, clock), clock


def test_hit_rates_stand_where_their_requests_ended() -> None:
    recent, clock = _recent()
    recent.finished(_request(cached={"hbm": 16}))
    clock.now += 3 * BIN_SECONDS
    recent.finished(_request(cached={"cpu": 16, "nvme": 16}))
    recent.finished(_request(prompt=5))
    summary = recent.tenants()["a"]
    assert summary["hit_rates"][-4:] == [0.5, None, None, 1.0]
    assert set(summary["hit_rates"][:-4]) == {None}
    assert summary["hit_rate"] == 48 / 64
    assert len(summary["hit_rates"]) * BIN_SECONDS == WINDOW_SECONDS


def test_what_is_old_is_forgotten() -> None:
    recent, clock = _recent()
    recent.finished(_request())
    clock.now += WINDOW_SECONDS + 1
    assert recent.tenants() == {}
    assert recent.slowest() == []
    assert recent.service()["requests"] == 0
    assert recent.service()["ttft_p99"] is None


@given(st.lists(st.floats(0.001, 9), min_size=1, max_size=150))
def test_percentiles_are_of_the_nearest_rank(seconds: list[float]) -> None:
    recent, _ = _recent()
    for first in seconds:
        recent.finished(_request(first_token=first))
    service = recent.service()
    for part, found in ((50, service["ttft_p50"]), (99, service["ttft_p99"])):
        assert found in seconds
        assert 100 * sum(first <= found for first in seconds) >= part * len(seconds)
        assert 100 * sum(first < found for first in seconds) < part * len(seconds)


def test_the_slowest_come_first_and_are_few() -> None:
    recent, _ = _recent()
    for number in range(50):
        recent.finished(_request(first_token=number / 10, cached={"hbm": 16}))
    recent.finished(_request(first_token=None, seconds=99.0))
    rows = recent.slowest()
    assert [row["ttft"] for row in rows[:3]] == [None, 4.9, 4.8]
    assert len(rows) == 20
    assert rows[1]["cached"] == {"hbm": 16}


def test_only_the_busiest_tenants_are_told_apart() -> None:
    recent, _ = _recent()
    for number in range(10):
        for _ in range(number):
            recent.finished(_request(f"t{number}"))
    assert list(recent.tenants(most=2)) == ["t8", "t9"]
    assert recent.service()["requests"] == 45

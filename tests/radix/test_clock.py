"""The shared clock on ranks whose own clocks differ."""

from sglang_ext.radix.clock import SharedClock


def test_the_clock_stands_still_between_ticks_and_never_goes_back() -> None:
    times = iter([100, 250, 200])
    clock = SharedClock(read=lambda: next(times))
    assert clock.now_ms == 100
    assert clock.now_ms == 100
    assert clock.tick() == 250
    assert clock.tick() == 250


def test_ranks_agree_on_the_latest_time() -> None:
    own_times = {0: 100, 1: 170}
    clocks = [
        SharedClock(agree=lambda _: max(own_times.values()), read=lambda rank=rank: own_times[rank])
        for rank in own_times
    ]
    assert [clock.now_ms for clock in clocks] == [170, 170]
    own_times.update({0: 230, 1: 200})
    assert [clock.tick() for clock in clocks] == [230, 230]

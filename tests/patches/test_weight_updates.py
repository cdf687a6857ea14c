"""An update that would leave pages of the former weights behind changes nothing."""

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.patches.weight_updates import weight_update_hooks

_FROM_DISK, _FLUSH = (hook.function for hook in weight_update_hooks())


def manager(*, idle: bool) -> Any:
    told: list[bool] = []
    cache = SimpleNamespace(weights_changed=lambda flushed: told.append(flushed), told=told)
    scheduler = SimpleNamespace(_engine_paused=False, tree_cache=cache)
    return SimpleNamespace(is_fully_idle=lambda ignore_waiting: idle, scheduler=scheduler)


@pytest.mark.trial(49)
@pytest.mark.parametrize(
    ("flush", "idle", "reason"), [(False, True, "flush_cache is false"), (True, False, "running")]
)
def test_an_update_without_a_flush_is_refused(flush: bool, idle: bool, reason: str) -> None:
    called: list[Any] = []
    request = SimpleNamespace(flush_cache=flush)
    answer = _FROM_DISK(lambda *args: called.append(args), manager(idle=idle), request)
    assert not called
    assert not answer.success
    assert reason in answer.message


def test_an_update_that_flushes_goes_on() -> None:
    request = SimpleNamespace(flush_cache=True)
    assert _FROM_DISK(lambda *_: "updated", manager(idle=True), request) == "updated"


@pytest.mark.parametrize(
    ("asked", "done", "flushed"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_the_cache_is_told_what_is_left(asked: bool, done: bool, flushed: bool) -> None:
    one = manager(idle=True)
    request = SimpleNamespace(flush_cache=asked)
    assert _FLUSH(lambda *_: (done, "text"), one, request, True, "text") == (done, "text")
    assert one.scheduler.tree_cache.told == [flushed]

"""Requests on their way when the policy changes."""

from typing import Any

from sglang_ext.patches.admission import refuse_outgrown
from sglang_ext.tenancy.loader import parse_policy
from sglang_ext.tenancy.quota import QuotaBook
from sglang_ext.types import Tier
from tests.patches.scheduling import Desk
from tests.patches.test_admission import Door, no_server

__all__ = ["no_server"]

TIGHT = "a: {quota: {hbm: 256tok, hard: true}}, b: {}"
WIDE = "a: {quota: {hbm: 768tok, hard: true}}, b: {}"


def change(desk: Desk, tenants: str) -> None:
    """Put another policy in force between two steps."""
    policy = parse_policy(f"version: 1\ntenants: {{{tenants}}}")
    book = QuotaBook(policy, Tier.HBM, desk.rig.size, 0)
    desk.rig.cache.limit([book])
    desk.scheduling.use(policy)


def test_who_waited_for_its_quota_starts_once_it_is_raised() -> None:
    desk = Desk(TIGHT)
    running, waiting = desk.submit("a", 150, 40), desk.submit("a", 150, 40)
    assert desk.admit() == [running]
    assert desk.admit() == []
    change(desk, WIDE)
    assert desk.admit() == [waiting]


def test_what_runs_goes_on_above_a_lower_quota_and_nothing_new_starts() -> None:
    desk = Desk(WIDE)
    running = desk.submit("a", 400, 40)
    assert desk.admit() == [running]
    change(desk, TIGHT)
    small = desk.submit("a", 40, 8)
    other = desk.submit("b", 40, 8)
    assert desk.admit() == [other]
    desk.finish(running)
    assert desk.admit() == [small]


def test_what_waits_and_can_never_start_does_not_keep_others_waiting() -> None:
    desk = Desk("a: {}, b: {}")
    door = Door(desk)
    assert door.enter(desk.request("a", 700, 40))
    assert door.enter(desk.request("b", 40, 8))
    change(desk, "a: {}, b: {reserve: {hbm: 512tok}}")
    released: list[Any] = []
    door._release_aborted_request = released.append
    assert refuse_outgrown(desk.scheduling, door) == 1
    assert door.sent[0]["status_code"] == 400
    assert "what nobody else has reserved" in door.sent[0]["message"]
    assert [req.rid.partition("/")[0] for req in released] == ["a"]
    assert len(desk.admit()) == 1


def test_a_removed_tenants_request_that_was_on_its_way_is_refused() -> None:
    desk = Desk("a: {}, b: {}")
    door = Door(desk)
    late = desk.request("a", 40, 8)
    change(desk, "b: {}")
    assert not door.enter(late)
    assert door.sent[0]["status_code"] == 403
    assert door.enter(desk.request("b", 40, 8))

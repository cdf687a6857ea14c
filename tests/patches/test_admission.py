"""Admission by quota and turn, on SGLang's PrefillAdder and our cache."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_policy import PrefillAdder

from sglang_ext.patches.admission import TenantPrefillAdder, admission_hooks
from sglang_ext.tenancy.fairness import QUANTUM_TOKENS
from sglang_ext.types import Owner, TenantId, Tier
from tests.patches.scheduling import PAGE, Desk

A = TenantId("a")
OWNER_A = Owner("t:a")


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stand in for the configuration of an engine, which a test has not."""
    fcfs = SimpleNamespace(schedule_policy="fcfs")
    monkeypatch.setattr("sglang.srt.managers.schedule_policy.get_schedule", lambda: fcfs)
    monkeypatch.setattr(PrefillAdder, "_replay_len", lambda self, req, prefix_len: 0)
    yield


def held(desk: Desk, owner: Owner) -> int:
    desk.begin_step()
    return desk.rig.cache.ledger.usage(owner, Tier.HBM).tokens


def test_over_a_hard_quota_a_tenant_waits_and_nobody_waits_for_it() -> None:
    desk = Desk("a: {quota: {hbm: 256tok, hard: true}}, b: {}")
    first, second = desk.submit("a", 100, 28), desk.submit("a", 100, 50)
    other = desk.submit("b", 100, 28)
    assert set(desk.admit()) == {first, other}
    assert ("quota", A) in desk.observed
    assert desk.admit() == []
    assert desk.queue == [second]
    desk.finish(first)
    assert desk.admit() == [second]


def test_small_requests_of_a_tenant_do_not_starve_its_large_one() -> None:
    desk = Desk("a: {quota: {hbm: 256tok, hard: true}}")
    running = desk.submit("a", 100, 12)
    assert desk.admit() == [running]
    large = desk.submit("a", 200, 40)
    small = [desk.submit("a", 16, 16) for _ in range(3)]
    assert desk.admit() == []
    desk.finish(running)
    assert desk.admit() == [large]
    desk.finish(large)
    assert desk.admit() == small


def test_a_hard_quota_holds_to_the_last_token_whatever_runs_together() -> None:
    desk = Desk("a: {quota: {hbm: 512tok, hard: true}}")
    for size in (30, 100, 61, 77, 16, 200, 33):
        desk.submit("a", size, size // 2)
    while desk.queue:
        assert desk.admit() or desk.running, "the next one would fit an idle machine"
        assert held(desk, OWNER_A) <= 512
        desk.finish(desk.running[0])


def test_cached_pages_make_room_for_their_owner() -> None:
    desk = Desk("a: {quota: {hbm: 256tok, hard: true}}")
    desk.rig.insert(list(range(1, 241)), "t:a")
    req = desk.submit("a", 200, 40)
    assert desk.admit() == [req]
    assert held(desk, OWNER_A) <= 256


def test_a_shared_prefix_counts_once() -> None:
    desk = Desk("a: {quota: {hbm: 256tok, hard: true}}")
    desk.rig.insert(list(range(1, 161)), "t:a")
    for _ in range(2):
        desk.submit("a", 170, 16, start=1)
    assert len(desk.admit()) == 2
    assert held(desk, OWNER_A) <= 256


def test_what_waits_for_memory_lets_only_reserves_pass() -> None:
    desk = Desk("a: {}, b: {reserve: {hbm: 128tok}}, c: {}")
    filler = desk.submit("a", 700, 36)
    assert desk.admit() == [filler]
    large = desk.submit("a", 200, 40)
    small, reserved = desk.submit("c", 16, 16), desk.submit("b", 60, 36)
    assert desk.admit() == [reserved]
    assert set(desk.queue) == {large, small}
    desk.finish(filler)
    assert set(desk.admit()) == {large, small}


def test_free_room_of_a_silent_reserve_is_not_run_into() -> None:
    desk = Desk("a: {}, b: {reserve: {hbm: 512tok}}")
    req = desk.submit("a", 500, 40)
    assert desk.admit() == []
    assert desk.queue == [req]
    assert desk.submit("b", 400, 30) in desk.admit()


def test_who_comes_back_gets_its_first_step_without_a_flood() -> None:
    desk = Desk("a: {}, b: {}")
    desk.scheduling.shares.arrive(A)
    desk.scheduling.shares.charge(A, 10 * QUANTUM_TOKENS)
    flood = [desk.submit("a", 40, 8) for _ in range(3)]
    quiet = desk.submit("b", 20, 8)
    assert desk.admit() == [quiet]
    assert ("turn", A) in desk.observed
    assert desk.admit() == flood


def test_with_equal_shares_tenants_share_a_batch() -> None:
    desk = Desk("a: {}, b: {}")
    both = {desk.submit("a", 40, 8), desk.submit("b", 20, 8)}
    assert set(desk.admit()) == both


def test_a_long_prompt_leaves_room_for_who_is_owed_a_step() -> None:
    desk = Desk("a: {}, b: {}")
    long = desk.request("a", 500, 8)
    desk.scheduling.ticket(long)
    policy = desk.fair_policy
    assert policy.shortest_prefill_chunk_limit(long, desk.queue, 128, PAGE) is None
    desk.scheduling.shares.charge(A, QUANTUM_TOKENS)
    desk.submit("b", 20, 8)
    assert policy.shortest_prefill_chunk_limit(long, desk.queue, 128, PAGE) == 96
    desk.submit("b", 500, 8)
    assert policy.shortest_prefill_chunk_limit(long, desk.queue, 128, PAGE) == 96


def test_one_unfinished_prompt_at_a_time() -> None:
    desk = Desk("a: {}")
    req = desk.submit("a", 200, 8)
    desk.begin_step()
    req.init_next_round_input(desk.rig.cache)
    batch = SimpleNamespace(reqs=[], batch_size=lambda: 0)
    adder = TenantPrefillAdder(
        PAGE, desk.rig.cache, desk.rig.allocator, batch, 0.5, 64, 64, scheduling=desk.scheduling
    )
    assert adder.add_one_req(req, True, None).name == "OTHER"
    assert adder.can_run_list == []
    assert adder.add_one_req(req, False, None).name == "OTHER"
    assert adder.new_chunked_req is req


# ---- at the door


class Door:
    """The scheduler as the hooks at the door see it."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.waiting_queue = desk.queue
        self.sent: list[Any] = []
        self._hooks = {
            hook.target.rsplit(".")[-1]: hook for hook in admission_hooks(desk.scheduling)
        }

    def send_abort_output(self, abort: Any, req: Any) -> None:
        self.sent.append(abort.finished_reason)

    def enter(self, req: Any) -> bool:
        refused = self._hooks["_abort_on_queued_limit"].function(lambda *_: False, self, req)
        if not refused:
            self.waiting_queue.append(req)
        return not refused

    def limit_output(self, req: Any, sglang: int) -> int:
        def original(scheduler: Any, seen: Any) -> None:
            seen.sampling_params.max_new_tokens = sglang

        self._hooks["init_req_max_new_tokens"].function(original, self, req)
        return int(req.sampling_params.max_new_tokens)


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    desk = Desk("a: {quota: {hbm: 256tok, hard: true}}, b: {}")
    door = Door(desk)
    assert door.enter(desk.request("a", 200, 16))
    assert not door.enter(desk.request("a", 250, 16))
    assert door.enter(desk.request("b", 250, 16))
    reason = door.sent[0]
    assert (reason["status_code"], reason["retry_after"]) == (400, 0)
    assert "288" in reason["message"]
    assert "256" in reason["message"]


def test_what_the_door_lets_in_is_admitted_sooner_or_later() -> None:
    desk = Desk("a: {quota: {hbm: 256tok, hard: true}}, b: {reserve: {hbm: 512tok}}")
    door = Door(desk)
    taken = [
        req for size in range(1, 600, 7) if door.enter(req := desk.request("a", size, size // 3))
    ]
    assert len(taken) > 20
    while desk.queue:
        assert desk.admit(), f"{len(desk.queue[0].origin_input_ids)} tokens never fit"
        for req in list(desk.running):
            desk.finish(req)


def test_an_open_ended_answer_is_cut_to_the_quota_and_then_fits() -> None:
    desk = Desk("a: {quota: {hbm: 256tok, hard: true}}, b: {}")
    door = Door(desk)
    open_ended, asked, other = (desk.request(name, 100, 0) for name in ("a", "a", "b"))
    open_ended.sampling_params.max_new_tokens = other.sampling_params.max_new_tokens = None
    asked.sampling_params.max_new_tokens = 900
    assert door.limit_output(open_ended, 900) == 140
    assert door.limit_output(other, 900) == 900
    assert door.limit_output(asked, 900) == 900
    assert door.enter(open_ended)
    assert not door.enter(asked)


def test_one_more_than_may_wait_is_told_when_to_come_back() -> None:
    desk = Desk("a: {max_queued: 3}, b: {max_queued: 1}")
    door = Door(desk)
    waiting = [desk.request("a", 10, 1) for _ in range(3)]
    assert all(door.enter(req) for req in waiting)
    assert not door.enter(desk.request("a", 10, 1))
    assert door.enter(desk.request("b", 10, 1)), "another tenant's queue is its own"
    reason = door.sent[0]
    assert (reason["status_code"], reason["retry_after"]) == (429, 1)
    door.waiting_queue.remove(waiting[0])
    assert door.enter(desk.request("a", 10, 1)), "an aborted request leaves its place"
    desk.scheduling.last_wait[A] = 4.2
    assert not door.enter(desk.request("a", 10, 1))
    assert door.sent[1]["retry_after"] == 5
    assert desk.observed == [("queue_full", A)] * 2


def test_a_retracted_request_is_always_taken_back() -> None:
    desk = Desk("a: {max_queued: 1}")
    door = Door(desk)
    assert door.enter(desk.request("a", 10, 1))
    back = desk.request("a", 10, 1)
    back.retracted_stain = True
    assert door.enter(back)
    assert not door.enter(desk.request("a", 10, 1))


def test_what_sglang_found_wrong_does_not_wait_to_hear_it() -> None:
    desk = Desk("a: {}")
    door = Door(desk)
    wrong = desk.request("a", 10, 1)
    wrong.to_finish = SimpleNamespace(status_code=400, message="too long")
    assert not door.enter(wrong)
    assert door.sent[0]["message"] == "too long"

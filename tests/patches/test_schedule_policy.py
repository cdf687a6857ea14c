"""The order of the waiting queue, what is charged, and the seams of SGLang that carry them."""

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_ext.patches.retraction import retraction_hooks
from sglang_ext.patches.schedule_policy import TENANT_FAIR, offer_tenant_fair
from sglang_ext.tenancy.fairness import LOCALITY, OUTPUT_WEIGHT
from sglang_ext.types import Owner, TenantId, Tier
from tests.patches.scheduling import Desk

A, B = TenantId("a"), TenantId("b")


def order(desk: Desk) -> list[Any]:
    desk.fair_policy.calc_priority(desk.queue)
    return list(desk.queue)


def test_the_command_line_knows_the_policy() -> None:
    from sglang.srt.server_args import prepare_server_args

    offer_tenant_fair()
    offer_tenant_fair()
    arguments = ["--model-path", "m", "--schedule-policy", TENANT_FAIR]
    assert prepare_server_args(arguments).schedule_policy == TENANT_FAIR


def test_the_longest_cached_prefix_goes_first_inside_a_tenant_only() -> None:
    desk = Desk("a: {}, b: {}")
    desk.rig.insert(list(range(1, 161)), "t:a")
    cold, other = desk.submit("a", 200, 1), desk.submit("b", 200, 1)
    hot = desk.submit("a", 200, 1, start=1)
    assert order(desk) == [hot, other, cold]
    assert desk.scheduling.ticket(hot).cached == 160


def test_the_order_of_tenants_does_not_tell_what_another_has_cached() -> None:
    tenants = []
    for cached in (False, True):
        desk = Desk("a: {}, b: {}")
        if cached:
            desk.rig.insert(list(range(1, 161)), "t:a")
        for _ in range(3):
            desk.submit("b", 200, 1)
        desk.submit("a", 200, 1)
        desk.submit("a", 200, 1, start=1)
        tenants.append([desk.scheduling.ticket(req).tenant for req in order(desk)][:2])
    assert tenants[0] == tenants[1]


def test_hits_cannot_overtake_beyond_their_group() -> None:
    desk = Desk("a: {}")
    desk.rig.insert(list(range(1, 161)), "t:a")
    first = [desk.submit("a", 40, 1) for _ in range(LOCALITY)]
    hot = desk.submit("a", 200, 1, start=1)
    assert order(desk) == [*first, hot]


def test_every_request_stays_in_a_long_queue() -> None:
    desk = Desk("a: {}, b: {}")
    submitted = {desk.submit(name, 20, 1) for name in "ab" for _ in range(400)}
    assert set(order(desk)) == submitted
    assert len(desk.queue) == 800


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DECODE])
def test_a_tenant_is_charged_what_is_computed_for_it(mode: ForwardMode) -> None:
    desk = Desk("a: {}, b: {weight: 2}")
    rows = [desk.request("a", 100, 8), desk.request("b", 50, 8), desk.request("b", 30, 8)]
    decoding = rows[1:] if mode is ForwardMode.MIXED else []
    lengths = [70, 1, 1] if mode is ForwardMode.MIXED else [70, 50, 30]
    batch = SimpleNamespace(
        reqs=rows, forward_mode=mode, extend_lens=lengths, decoding_reqs=decoding or None
    )
    desk.scheduling.charge(batch)
    counter = desk.scheduling.shares.counter
    expected = {
        ForwardMode.EXTEND: (70, 80 / 2),
        ForwardMode.MIXED: (70, 2 * OUTPUT_WEIGHT / 2),
        ForwardMode.DECODE: (OUTPUT_WEIGHT, 2 * OUTPUT_WEIGHT / 2),
    }
    assert (counter(A), counter(B)) == expected[mode]


def test_what_runs_is_in_the_ledger_and_what_it_may_still_take_is_known() -> None:
    desk = Desk("a: {quota: {hard: true}}, b: {}")
    req = desk.request("a", 100, 28)
    req.kv.kv_allocated_len, req.kv.cache_protected_len = 112, 48
    done = desk.request("b", 10, 1)
    done.kv.kv_allocated_len, done.finished_reason = 32, "stop"
    desk.running = [req, done]
    desk.begin_step()
    ledger = desk.rig.cache.ledger
    assert ledger.usage(Owner("t:a"), Tier.HBM).running == 64
    assert desk.scheduling.growth[Owner("t:a")] == 16
    assert ledger.usage(Owner("t:b"), Tier.HBM).running == 0
    desk.running = []
    desk.begin_step()
    assert ledger.usage(Owner("t:a"), Tier.HBM).tokens == 0


def test_a_ticket_survives_retraction() -> None:
    desk = Desk("a: {}")
    req = desk.submit("a", 10, 4)
    ticket = desk.scheduling.ticket(req)
    desk.submit("a", 10, 4)
    desk.queue.remove(req)
    desk.scheduling.arrived(req, desk.queue)
    desk.queue.append(req)
    assert desk.scheduling.ticket(req) is ticket
    assert order(desk)[0] is req
    assert desk.scheduling.backlog.counts(desk.queue) == {A: 2}


def test_an_unknown_tenant_is_the_system() -> None:
    desk = Desk("a: {}")
    req = desk.request("a", 10, 1)
    req.rid = "HEALTH_CHECK_1"
    assert desk.scheduling.ticket(req).tenant == "system"


def test_retraction_takes_from_who_is_over_its_share() -> None:
    desk = Desk("a: {}, b: {}", tokens=512)
    rows = [desk.request(name, 10, 9) for name in "baab"]
    for req, held in zip(rows, (40, 300, 80, 60), strict=True):
        req.kv.kv_allocated_len = held
    desk.running = rows
    desk.begin_step()
    (hook,) = retraction_hooks(desk.scheduling)
    kept_first = hook.function(lambda reqs: [0, 1, 2, 3], rows)
    assert kept_first[::-1][:2] == [2, 1], "a is above, in SGLang's own order"
    assert sorted(kept_first) == [0, 1, 2, 3]

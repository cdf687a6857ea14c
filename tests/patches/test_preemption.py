"""Who gives way, with SGLang's own release of a request's KV, on our cache."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache

from sglang_ext.patches.admission import TenantPrefillAdder
from sglang_ext.patches.versions import check_signature
from sglang_ext.tenancy.fairness import QUANTUM_TOKENS
from sglang_ext.tenancy.retraction import MOST_PREEMPTIONS
from sglang_ext.types import TenantId
from tests.patches.scheduling import PAGE, Desk

A, B = TenantId("a"), TenantId("b")
STEP = 64


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stand in for the configuration of an engine, which a test has not."""
    settings = SimpleNamespace(
        schedule_policy="fcfs",
        strip_thinking_cache=False,
        disaggregation_mode="null",
        speculative_algorithm=None,
    )
    monkeypatch.setattr("sglang.srt.managers.schedule_policy.get_schedule", lambda: settings)
    for name in ("get_serving", "get_disagg"):
        monkeypatch.setattr(f"sglang.srt.managers.schedule_batch.{name}", lambda: settings)
    for name in ("get_serving", "get_spec"):
        monkeypatch.setattr(f"sglang.srt.mem_cache.common.{name}", lambda: settings)
    monkeypatch.setattr(PrefillAdder, "_replay_len", lambda self, req, prefix_len: 0)
    yield


class Batch:
    """A running batch: SGLang's rows, and its way to release one."""

    def __init__(self, desk: Desk) -> None:
        self.reqs: list[Any] = []
        self.batch_is_full = False
        self._cache = desk.rig.cache

    def batch_size(self) -> int:
        return len(self.reqs)

    def release_req(self, row: int, remaining: int) -> None:
        from sglang.srt.managers.schedule_batch import release_req

        release_req(
            req=self.reqs[row],
            remaing_req_count=remaining,
            req_to_token_pool=self._cache.req_to_token_pool,
            token_to_kv_pool_allocator=self._cache.token_to_kv_pool_allocator,
            tree_cache=self._cache,
            hisparse_coordinator=None,
        )

    def filter_batch(self, keep_indices: list[int]) -> None:
        self.reqs = [self.reqs[row] for row in keep_indices]


class Engine:
    """Passes of admissions that compute what they admit, on one desk."""

    def __init__(self, tenants: str, tokens: int = 2048) -> None:
        self.desk = Desk(tenants, tokens)
        self.batch = Batch(self.desk)
        self.chunked: Any = None
        self.finished: list[Any] = []

    def adder(self, limit: int) -> TenantPrefillAdder:
        """Return what admits in one pass that computes ``limit`` prompt tokens."""
        desk = self.desk
        return TenantPrefillAdder(
            PAGE, desk.rig.cache, desk.rig.allocator, self.batch, 1.0, 8192, limit,
            scheduling=desk.scheduling,
        )  # fmt: skip

    def step(self, limit: int = STEP) -> list[Any]:
        """Run one pass as SGLang does; return what the batch computes."""
        desk = self.desk
        in_flight = [*self.batch.reqs, *([self.chunked] if self.chunked else [])]
        desk.scheduling.count_running(in_flight)
        desk.fair_policy.calc_priority(desk.queue)
        adder = self.adder(limit)
        if self.chunked is not None:
            self.chunked.init_next_round_input()
            self.chunked = adder.add_chunked_req(self.chunked)
        for req in desk.queue:
            if adder.budget_state().name == "OTHER":
                break
            req.init_next_round_input(desk.rig.cache)
            if adder.add_one_req(req, self.chunked is not None, None).name != "CONTINUE":
                break
        desk.queue = [req for req in desk.queue if req not in adder.can_run_list]
        for req in adder.preempt_list:
            desk.scheduling.arrived(req, desk.queue)
            desk.queue.append(req)
        self.chunked = adder.new_chunked_req or self.chunked
        for req in adder.can_run_list:
            self._compute(req)
        return list(adder.can_run_list)

    def _compute(self, req: Any) -> None:
        """Allocate and publish what a batch computes of ``req``, and charge its tenant."""
        cache, kv, tenant = self.desk.rig.cache, req.kv, self.desk.scheduling.ticket(req)
        pool, core = cache.req_to_token_pool, cache.tree_core
        (row,) = pool.alloc([req])
        held = kv.kv_allocated_len or req.prefix_len
        if held and not kv.kv_allocated_len:
            cached = core.collect_full_device_indices(req.last_node, core.root_node_handle())
            pool.write((row, slice(0, held)), cached)
        grown = -(-req.extend_end // PAGE) * PAGE - held
        with self.desk.scheduling.allocating({tenant.owner: grown}):
            pool.write((row, slice(held, held + grown)), self.desk.rig.alloc(grown))
        kv.kv_allocated_len = kv.kv_committed_len = req.extend_end
        self.desk.scheduling.shares.charge(tenant.tenant, req.extend_end - req.prefix_len)
        req.is_retracted = False
        checkpoint_kv_cache(req, cache)
        if req is not self.chunked:
            self.batch.reqs.append(req)

    def finish(self, req: Any) -> None:
        """End a running request; what it had computed stays cached."""
        release_kv_cache(req, self.desk.rig.cache, checkpoint=False)
        self.batch.reqs.remove(req)

    def check(self) -> None:
        """Check that every token of the pool has one place."""
        cache, pool = self.desk.rig.cache, self.desk.rig.allocator
        running = {id(req): req.kv for req in [*self.batch.reqs, self.chunked] if req is not None}
        private = sum(
            -(-kv.kv_allocated_len // PAGE) * PAGE - kv.cache_protected_len
            for kv in running.values()
        )
        assert pool.available_size() + cache.evictable_size() + cache.protected_size() == (
            pool.size - private
        )
        cache.sanity_check()


def test_a_long_prompt_gives_way_between_two_chunks_and_loses_nothing() -> None:
    engine = Engine("a: {}, b: {}")
    long = engine.desk.submit("a", 10 * STEP, 8)
    assert engine.step() == [long]
    assert engine.step() == [long]
    quiet = engine.desk.submit("b", 2 * STEP, 8)
    engine.desk.scheduling.shares.charge(A, QUANTUM_TOKENS)
    assert engine.step() == [quiet]
    engine.check()
    assert ("turn", A) in engine.desk.observed
    assert engine.step() == [quiet], "its prompt goes on alone"
    assert engine.step() == [long]
    assert long.prefix_len == 3 * STEP, "it goes on where it was"
    engine.check()


def test_a_long_prompt_goes_on_when_nobody_is_owed_a_step() -> None:
    engine = Engine("a: {}, b: {}")
    long = engine.desk.submit("a", 5 * STEP, 8)
    assert engine.step() == [long]
    other = engine.desk.submit("b", STEP, 8)
    steps = [engine.step() for _ in range(5)]
    assert [other] in steps
    assert [long] in steps[:1]


@pytest.mark.parametrize(
    "reason", ["in flight", "not cached", "full batch", "no room", "too often"]
)
def test_a_long_prompt_does_not_give_way_for_nothing(reason: str) -> None:
    engine = Engine("a: {}, b: {}", tokens=1024)
    long = engine.desk.submit("a", 10 * STEP, 8)
    engine.step()
    engine.desk.submit("b", 64, 960 if reason == "no room" else 8)
    engine.desk.scheduling.shares.charge(A, QUANTUM_TOKENS)
    long.inflight_middle_chunks = int(reason == "in flight")
    long.return_logprob = reason == "not cached"
    engine.batch.batch_is_full = reason == "full batch"
    long.retraction_count = MOST_PREEMPTIONS if reason == "too often" else 0
    assert long in engine.step()


def test_a_flood_of_newcomers_cannot_stop_a_prompt_for_ever() -> None:
    engine = Engine("a: {weight: 0.25}, b: {}", tokens=4096)
    long = engine.desk.submit("a", 10 * STEP, 8)
    for _ in range(200):
        engine.desk.submit("b", 2 * STEP, 8)
        engine.step()
        for req in [req for req in engine.batch.reqs if req is not long]:
            engine.finish(req)
        if long in engine.batch.reqs:
            break
    assert long in engine.batch.reqs
    assert 0 < long.retraction_count <= MOST_PREEMPTIONS


CLASSES = "low: {sla: basic}, mid: {}, top: {sla: premium}"


def test_running_requests_of_a_lower_class_make_room_for_a_higher_one() -> None:
    engine = Engine(CLASSES, tokens=1024)
    low = [engine.desk.submit("low", 128, 160) for _ in range(4)]
    assert engine.step(8192) == low[:3]
    top = engine.desk.submit("top", 128, 160)
    assert top in engine.step(8192)
    assert ("class", TenantId("low")) in engine.desk.observed
    assert low[0] in engine.batch.reqs, "the last to come is the first to go"
    engine.check()
    while engine.batch.reqs:
        engine.finish(engine.batch.reqs[0])
        engine.step(8192)
    engine.check()


def test_a_higher_class_gets_a_place_in_a_full_batch() -> None:
    engine = Engine(CLASSES)
    low = [engine.desk.submit("low", 200, 8) for _ in range(4)]
    assert engine.step(8192) == low
    adder = engine.adder(STEP)
    assert not adder.preempt_to_schedule(engine.desk.submit("low", 16, 8))
    assert adder.preempt_to_schedule(engine.desk.submit("top", 16, 8))
    assert engine.batch.reqs == low[:3]
    assert adder.preempt_list == low[3:]


def test_sglangs_own_priorities_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(CLASSES)
    engine.desk.scheduling.fair = False
    monkeypatch.setattr(PrefillAdder, "preempt_to_schedule", lambda self, req: True)
    assert engine.adder(STEP).preempt_to_schedule(engine.desk.submit("low", 16, 8))


def test_the_same_class_and_a_higher_one_make_no_room() -> None:
    engine = Engine(CLASSES, tokens=1024)
    running = [engine.desk.submit("mid", 128, 120) for _ in range(3)]
    assert engine.step(8192) == running
    for name in ("mid", "low"):
        engine.desk.submit(name, 128, 200)
        engine.step(8192)
    assert engine.batch.reqs == running


def test_nobody_is_driven_below_its_fair_share() -> None:
    engine = Engine("low: {sla: basic, weight: 3}, top: {sla: premium, weight: 1}", tokens=1024)
    low = [engine.desk.submit("low", 128, 120) for _ in range(3)]
    assert engine.step(8192) == low
    engine.desk.submit("top", 300, 300)
    engine.step(8192)
    assert engine.batch.reqs == low


def test_what_would_not_be_enough_is_not_taken() -> None:
    engine = Engine(CLASSES, tokens=1024)
    running = [engine.desk.submit("low", 100, 10) for _ in range(3)]
    running.append(engine.desk.submit("mid", 300, 300))
    assert set(engine.step(8192)) == set(running)
    engine.desk.submit("top", 300, 600)
    engine.step(8192)
    assert set(engine.batch.reqs) == set(running)


def test_a_turn_under_a_flood_waits_for_the_step_that_runs_and_no_other() -> None:
    """However long the flood's prompts are, and wherever in them the turn comes."""
    engine = Engine("a: {}, b: {}", tokens=16_384)
    waits: list[int] = []
    for turn in range(12):
        quiet = engine.desk.submit("b", 5 * STEP + 20, 1)
        steps = 0
        while quiet not in engine.batch.reqs:
            assert engine.step() == [quiet]
            steps += 1
        waits.append(steps)
        engine.finish(quiet)
        for _ in range(12 + turn % 5):
            while len(engine.desk.queue) < 6:
                engine.desk.submit("a", 9 * STEP + turn, 1)
            engine.step()
            for req in list(engine.batch.reqs):
                engine.finish(req)
        engine.check()
    assert waits == [6] * len(waits)


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (PrefillAdder.add_chunked_req, ("self", "req")),
        (PrefillAdder.add_one_req, ("self", "req", "has_chunked_req", "truncation_align_size")),
        (PrefillAdder.preempt_to_schedule, ("self", "req")),
        (PrefillAdder._get_running_request_total_token_offset, ("self", "req")),
        (ScheduleBatch.release_req, ("self", "idx", "remaing_req_count", "offload_kv")),
        (ScheduleBatch.filter_batch, ("self", "reqs_to_exclude", "keep_indices")),
    ],
)
def test_what_is_overridden_and_called_is_as_in_this_release(
    function: Callable[..., object], parameters: tuple[str, ...]
) -> None:
    check_signature(function, parameters)

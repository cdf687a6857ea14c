"""The simulator against closed forms: known hits of LRU, a single queue, and an endless cache."""

import random
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest

from sglang_ext.plan.hardware import GPUS, Cluster, Efficiency, Model
from sglang_ext.plan.published import cluster_72b
from sglang_ext.plan.requests import PlanRequest, rag_requests
from sglang_ext.plan.simulator import Load, Served, simulate
from sglang_ext.plan.tier import SimulatedTier
from sglang_ext.plan.tiers import Sizes, TierStack
from sglang_ext.plan.workload import RagShape, RagTraffic, distinct_tokens, rag_turns
from sglang_ext.tenancy.loader import parse_policy
from sglang_ext.types import Owner, Tier

_SMALL = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
_CLUSTER = Cluster(gpu=GPUS["h200"], gpus=1, model=Model.from_config(_SMALL))
_A, _B = Owner("t:a"), Owner("t:b")


def _request(
    at: float, blocks: Iterable[int], tenant: str = "a", conversation: int = -1
) -> PlanRequest:
    text = array("q", blocks)
    name = conversation if conversation >= 0 else round(at * 1000)
    return PlanRequest(at, tenant, name, text, len(text) * 10, 5, array("q"))


def _served(requests: Sequence[PlanRequest], **sizes: int) -> list[Served]:
    stack = TierStack(Sizes(block=10, **sizes))
    return list(simulate(requests, _CLUSTER, stack))


def test_a_tier_keeps_the_most_recent_and_counts_whose_it_is() -> None:
    tier = SimulatedTier(4, lambda: 0)
    for name in range(6):
        assert tier.put(_A, array("q", [name]))
    assert [tier.find(_A, array("q", [name])) for name in range(6)] == [0, 0, 1, 1, 1, 1]
    assert (tier.held(_A), tier.held(_B), tier.free) == (4, 0, 0)
    assert tier.find(_B, array("q", [5])) == 0


def test_what_is_locked_stays_and_what_does_not_fit_is_refused() -> None:
    tier = SimulatedTier(4, lambda: 0)
    held = tier.hold(_A, array("q", [1, 2, 3]))
    assert held is not None and held.present == 0
    assert not tier.put(_A, array("q", [7, 8]))
    assert tier.hold(_A, array("q", [7, 8])) is None
    assert tier.find(_A, array("q", [1, 2, 3])) == 3
    held.release()
    assert tier.put(_A, array("q", [7, 8]))


def test_hits_are_those_of_lru() -> None:
    """One-block prompts drawn at random, against the textbook list of the last 20 names."""
    draw = random.Random(5)
    names = [min(int(draw.expovariate(0.05)), 99) for _ in range(3_000)]
    requests = [_request(float(at), [0, name + 1]) for at, name in enumerate(names)]
    served = _served(requests, hbm=210)
    recent: list[int] = []
    hits = 0
    for name in names:
        hits += name in recent
        recent = [*(other for other in recent if other != name), name][-20:]
    # A hit of the last block is all tokens but one.
    found = sum(each.found.get(Tier.HBM, 0) > 10 for each in served)
    assert found == hits


def test_without_room_below_everything_known_beyond_it_is_recomputed() -> None:
    loop = [_request(float(at), [at % 5 * 2, at % 5 * 2 + 1]) for at in range(50)]
    assert sum(each.recomputed for each in _served(loop, hbm=80)) == 45 * 19
    assert sum(each.recomputed for each in _served(loop, hbm=80, cpu=200)) == 0
    assert sum(each.recomputed for each in _served(loop, hbm=100)) == 0


def test_a_lower_tier_gives_back_what_the_upper_lost() -> None:
    loop = [_request(float(at), range(at % 5 * 100, at % 5 * 100 + 50)) for at in range(20)]
    stack = TierStack(Sizes(block=10, hbm=1_000, cpu=1_500, nvme=100_000))
    late = list(simulate(loop, cluster_72b(Efficiency()), stack))[5:]
    assert all(each.recomputed == 0 for each in late)
    assert all(each.found.keys() == {Tier.NVME} for each in late)


def test_what_is_quicker_to_compute_than_to_load_is_computed() -> None:
    loop = [_request(100.0 * at, range(at % 5 * 100, at % 5 * 100 + 50)) for at in range(20)]
    sizes = Sizes(block=10, hbm=1_000, cpu=1_500, nvme=100_000, disk_latency=10.0)
    late = list(simulate(loop, cluster_72b(Efficiency()), TierStack(sizes)))[8:]
    assert all(each.found == {} and each.recomputed == 499 for each in late)


def test_one_at_a_time_waits_for_nobody() -> None:
    (alone,) = _served([_request(0.0, range(100))], hbm=10_000)
    steps = _CLUSTER.efficiency
    expected = _CLUSTER.prefill_seconds(1_000, 0) + steps.step_seconds + steps.request_seconds
    assert alone.ttft == pytest.approx(expected)
    assert alone.end - alone.ttft + steps.request_seconds == pytest.approx(
        5 * _CLUSTER.decode_seconds(1, 1_000) + steps.request_seconds, rel=0.1
    )


def test_a_queue_is_served_one_after_the_other() -> None:
    burst = [_request(0.0, range(n * 100, n * 100 + 100), conversation=n) for n in range(10)]
    waits = sorted(each.ttft for each in _served(burst, hbm=20_000))
    one = _CLUSTER.prefill_seconds(1_000, 0) + _CLUSTER.efficiency.step_seconds
    gaps = [b - a for a, b in zip(waits, waits[1:], strict=False)]
    assert gaps == pytest.approx([one] * 9)


def test_requests_queue_for_the_one_process_of_the_host() -> None:
    cluster = replace(_CLUSTER, efficiency=Efficiency(host_seconds=0.5))
    burst = [_request(0.0, range(n * 100, n * 100 + 100), conversation=n) for n in range(5)]
    stack, load = TierStack(Sizes(block=10, hbm=20_000)), Load()
    waits = sorted(each.ttft for each in simulate(burst, cluster, stack, load=load))
    steps = cluster.efficiency
    compute = cluster.prefill_seconds(1_000, 0) + steps.step_seconds + steps.request_seconds
    assert compute < 0.5
    assert waits == pytest.approx([0.5 * (n + 1) + compute for n in range(5)])
    assert load.host == pytest.approx(2.5)


def test_a_tenant_that_sent_little_goes_before_one_that_floods() -> None:
    flood = [_request(0.0, range(n * 100, n * 100 + 100), conversation=n) for n in range(30)]
    quiet = _request(1e-6, range(9_000, 9_010), tenant="b", conversation=99)
    served = _served([*flood, quiet], hbm=100_000)
    order = [each.request.tenant for each in sorted(served, key=lambda each: each.ttft)]
    assert order.index("b") <= 1


def test_a_closed_loop_never_runs_more_than_its_clients_and_loses_nobody() -> None:
    shape = RagShape(system=20, context=40, documents=2, question=10, answer=10)
    turns = rag_turns(shape, RagTraffic(conversations=40), 1)
    requests = list(rag_requests(turns, 1.0, 10))
    stack = TierStack(Sizes(hbm=100_000, block=10))
    served = list(simulate(requests, _CLUSTER, stack, clients=3))
    assert len(served) == len(requests)
    marks = [(each.request.at, 1) for each in served] + [(each.end, -1) for each in served]
    running = most = 0
    for _, change in sorted(marks, key=lambda mark: (mark[0], mark[1])):
        running += change
        most = max(most, running)
    assert most <= 3


def test_an_endless_cache_recomputes_nothing_and_holds_the_working_set() -> None:
    shape = RagShape(system=20, context=40, documents=2, question=10, answer=10)
    turns = rag_turns(shape, RagTraffic(conversations=60), 1)
    size = distinct_tokens(turns)
    stack = TierStack(Sizes(hbm=size, block=10))
    served = list(simulate(rag_requests(turns, 1.0, 10), _CLUSTER, stack))
    assert sum(each.known for each in served) > 0
    assert sum(each.recomputed for each in served) == 0
    held = sum(stack.tiers[Tier.HBM].held(Owner(f"t:t{number}")) for number in range(6))
    assert held * 10 == size


_POLICY = """
version: 1
defaults: {ttl: {hbm: 10s, cpu: 10s, nvme: 20s, mode: strict}}
tenants:
  a: {api_keys: [], quota: {hbm: 25%, hard: true}}
  b: {api_keys: []}
"""


def test_quotas_and_ages_of_the_policy_hold() -> None:
    policy = parse_policy(_POLICY)
    stack = TierStack(Sizes(hbm=400, nvme=4_000, block=10), policy)
    flood = [_request(float(at), [at * 2, at * 2 + 1], "a") for at in range(8)]
    for each in simulate(flood, _CLUSTER, stack):
        assert each.recomputed == 0
    assert stack.tiers[Tier.HBM].held(_A) <= 10
    assert stack.tiers[Tier.NVME].held(_A) == 16
    stack.tick(60.0)
    assert [tier.held(_A) for tier in stack.tiers.values()] == [0, 0]

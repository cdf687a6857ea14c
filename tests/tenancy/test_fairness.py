"""Fair order: shares by weight, no saved credit, and a bound on waiting."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.tenancy.fairness import LOCALITY, FairShares, Waiting
from sglang_ext.types import TenantId

A, B, C = TenantId("a"), TenantId("b"), TenantId("c")


class Machine:
    """Admits one request a round and computes it at once; ``served`` counts tokens by tenant."""

    def __init__(self, weights: Mapping[TenantId, float], quantum: int = 512) -> None:
        self.shares = FairShares(lambda tenant: weights[tenant], quantum)
        self.waiting: list[Waiting] = []
        self.served: Counter[TenantId] = Counter()
        self.admitted: list[Waiting] = []
        self._arrived = 0
        self._numbers: Counter[TenantId] = Counter()

    def submit(self, tenant: TenantId, uncached: int, cached: int = 0) -> Waiting:
        request = Waiting(tenant, self._arrived, self._numbers[tenant], uncached, cached)
        self._arrived += 1
        self._numbers[tenant] += 1
        self.waiting.append(request)
        self.shares.arrive(tenant)
        return request

    def round(self) -> Waiting:
        self.shares.observe(request.tenant for request in self.waiting)
        request = self.waiting.pop(self.shares.order(self.waiting)[0])
        self.shares.charge(request.tenant, request.uncached)
        self.served[request.tenant] += request.uncached
        self.admitted.append(request)
        return request

    def keep_backlogged(self, sizes: Mapping[TenantId, int], rounds: int) -> None:
        for _ in range(rounds):
            present = {request.tenant for request in self.waiting}
            for tenant in sizes.keys() - present:
                self.submit(tenant, sizes[tenant])
            self.round()


def test_equal_weights_share_equally_however_long_the_prompts() -> None:
    machine = Machine({A: 1, B: 1})
    machine.keep_backlogged({A: 1000, B: 100}, 500)
    assert 0.95 < machine.served[A] / machine.served[B] < 1.05


@pytest.mark.parametrize("heavy", [3.0, 0.25])
def test_shares_follow_weights(heavy: float) -> None:
    machine = Machine({A: 1, B: heavy})
    machine.keep_backlogged({A: 70, B: 300}, 2000)
    assert machine.served[B] / machine.served[A] == pytest.approx(heavy, rel=0.05)


def test_a_tenant_alone_gets_everything() -> None:
    machine = Machine({A: 0.001, B: 1000})
    machine.keep_backlogged({A: 100}, 50)
    assert machine.served == {A: 5000}


def test_an_idle_tenant_saves_up_one_quantum_and_no_more() -> None:
    machine = Machine({A: 1, B: 1}, quantum=300)
    machine.keep_backlogged({A: 100}, 1000)
    before = machine.served[A]
    machine.submit(B, 100)
    for _ in range(10):
        machine.submit(B, 100)
        machine.submit(A, 100)
    for _ in range(4):
        machine.round()
    assert [request.tenant for request in machine.admitted[-4:]].count(B) == 3
    machine.keep_backlogged({A: 100, B: 100}, 16)
    assert machine.served[B] - (machine.served[A] - before) in (200, 300, 400)


def test_a_newcomer_does_not_queue_behind_a_flood() -> None:
    machine = Machine({A: 1, B: 1})
    for _ in range(50):
        machine.submit(A, 100)
    for _ in range(10):
        machine.round()
    quiet = machine.submit(B, 100)
    assert machine.round() is quiet


def test_newcomers_share_by_weight_from_their_first_token() -> None:
    machine = Machine({A: 1, B: 3, C: 1})
    machine.keep_backlogged({C: 100}, 50)
    machine.submit(A, 30)
    machine.submit(B, 30)
    machine.keep_backlogged({A: 30, B: 30}, 40)
    assert machine.served[B] / machine.served[A] == pytest.approx(3, rel=0.1)


def test_no_credit_from_running_without_waiting() -> None:
    """A tenant whose one request ran all the time was not held back, so nothing is owed to it."""
    machine = Machine({A: 1, B: 1}, quantum=0)
    machine.submit(B, 1)
    machine.round()
    machine.keep_backlogged({A: 100}, 100)
    machine.shares.charge(B, 5)
    for _ in range(10):
        machine.submit(B, 100)
        machine.submit(A, 100)
    for _ in range(10):
        machine.round()
    assert 4 <= [request.tenant for request in machine.admitted[-10:]].count(B) <= 6


def test_a_cached_prefix_goes_first_inside_its_tenant_only() -> None:
    machine = Machine({A: 1, B: 1})
    cold = machine.submit(A, 100)
    other = machine.submit(B, 100)
    hot = machine.submit(A, 100, cached=900)
    order = [machine.waiting[index] for index in machine.shares.order(machine.waiting)]
    assert order == [hot, other, cold]
    colder = [replace(request, cached=0) for request in machine.waiting]
    tenants = [colder[index].tenant for index in machine.shares.order(colder)]
    assert tenants == [request.tenant for request in order], "B's turn tells what A has cached"


def test_a_hot_stream_cannot_starve_a_cold_request_of_its_own_tenant() -> None:
    machine = Machine({A: 1})
    cold = machine.submit(A, 500)
    for _ in range(LOCALITY + 1):
        machine.submit(A, 10, cached=500)
        machine.round()
    assert cold in machine.admitted


def test_limit_keeps_every_request() -> None:
    machine = Machine({A: 1, B: 1})
    for _ in range(5):
        machine.submit(A, 10)
    machine.submit(B, 10)
    order = machine.shares.order(machine.waiting, limit=2)
    assert order[:2] == [0, 5]
    assert sorted(order) == list(range(6))


def test_deficits_sum_to_nothing_and_name_who_lacks() -> None:
    shares = FairShares({A: 1.0, B: 3.0}.__getitem__)
    shares.observe([A, B])
    shares.charge(A, 400)
    assert shares.deficits() == {A: -300, B: 300}
    assert shares.behind(B, A) == 400


def test_no_tenant_no_deficit() -> None:
    assert FairShares(lambda tenant: 1).deficits() == {}


arrivals = st.lists(
    st.tuples(st.sampled_from([A, B, C]), st.integers(1, 400), st.integers(0, 1000)),
    min_size=1,
    max_size=60,
)
sizes = st.lists(st.integers(1, 400), min_size=1, max_size=20)


@settings(deadline=None)
@given(
    before=arrivals,
    after=sizes,
    weights=st.fixed_dictionaries({name: st.sampled_from([0.5, 1, 2]) for name in (A, B, C)}),
    quantum=st.sampled_from([0, 64, 512]),
)
def test_waiting_is_bounded(
    before: list[tuple[TenantId, int, int]],
    after: list[int],
    weights: dict[TenantId, float],
    quantum: int,
) -> None:
    """Whatever came before, and while the others and its own tenant's hits never stop coming."""
    machine = Machine(weights, quantum)
    for step, (tenant, uncached, cached) in enumerate(before):
        machine.submit(tenant, uncached, cached)
        if step % 2:
            machine.round()
    k = LOCALITY + sum(request.tenant == A for request in machine.waiting)
    mine = machine.submit(A, 400)
    share = {other: weights[other] / weights[A] * (k * 400 + 400) for other in (B, C)}
    share = {other: most + weights[other] * quantum + 800 for other, most in share.items()}
    bound = k + sum(share.values())
    start = machine.served.copy()
    own = rounds = 0
    while mine in machine.waiting:
        present = Counter(request.tenant for request in machine.waiting)
        for tenant in (B, C):
            if not present[tenant]:
                machine.submit(tenant, after[rounds % len(after)])
        if present[A] < k + 2:
            machine.submit(A, 1, cached=5000)
        own += machine.round().tenant == A
        rounds += 1
        assert own <= k, "overtaken by too many requests of its own tenant"
        for tenant, most in share.items():
            assert machine.served[tenant] - start[tenant] <= most
        assert rounds <= bound


@given(arrivals, st.one_of(st.none(), st.integers(0, 80)))
def test_order_is_a_permutation(
    requests: list[tuple[TenantId, int, int]], limit: int | None
) -> None:
    machine = Machine({A: 1, B: 2, C: 0.5})
    for tenant, uncached, cached in requests:
        machine.submit(tenant, uncached, cached)
    assert sorted(machine.shares.order(machine.waiting, limit)) == list(range(len(requests)))

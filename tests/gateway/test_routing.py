"""One home for a session; for the rest two equals, what is warm, and load; only own engines."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.gateway.plan import EngineSpec
from sglang_ext.gateway.routing import Routing
from sglang_ext.types import TenantId

SESSIONS = st.none() | st.text(min_size=1, max_size=8)
NAMES = st.text("abcdefgh", min_size=1, max_size=3).map(TenantId)


def replicas(count: int, dedicated: tuple[str, ...] = ()) -> list[EngineSpec]:
    shared = [EngineSpec(f"shared-{number}", None, 0, 1) for number in range(count)]
    return [*shared, *(EngineSpec(name, TenantId(name), 0, 1) for name in dedicated)]


@given(tenant=NAMES, session=SESSIONS, count=st.integers(1, 6), load=st.lists(st.integers(0, 9)))
def test_a_request_goes_to_its_tenants_engines_only(
    tenant: TenantId, session: str | None, count: int, load: list[int]
) -> None:
    routing = Routing(replicas(count, ("a", "bb")))
    in_flight = dict(zip(routing.names, load, strict=False))
    order = routing.order(tenant, session, in_flight)
    assert sorted(order) == sorted(routing.engines_of(tenant))
    if tenant in ("a", "bb"):
        assert order == (tenant,)
    else:
        assert set(order) == {f"shared-{number}" for number in range(count)}


@pytest.mark.trial(14)
@given(tenant=NAMES, session=SESSIONS, others=st.lists(st.tuples(NAMES, SESSIONS), max_size=9))
def test_nothing_that_others_sent_or_cached_attracts_a_request(
    tenant: TenantId, session: str | None, others: list[tuple[TenantId, str | None]]
) -> None:
    """With equal load, only the tenant, its session and what is warm for its owner count."""
    routing, fresh = Routing(replicas(5)), Routing(replicas(5))
    for other, its_session in others:
        routing.order(other, its_session, {})
    assert routing.order(tenant, session, {}) == fresh.order(tenant, session, {})


@given(tenant=NAMES, session=st.text(min_size=1), load=st.lists(st.integers(0, 9), max_size=5))
def test_a_session_stays_at_home_whatever_the_load(
    tenant: TenantId, session: str, load: list[int]
) -> None:
    routing = Routing(replicas(5))
    in_flight = dict(zip(routing.names, load, strict=False))
    assert routing.order(tenant, session, in_flight) == routing.order(tenant, session, {})


LOADS = st.lists(st.integers(0, 20), min_size=5, max_size=5)


@given(tenant=NAMES, load=LOADS)
def test_the_less_loaded_of_two_equals_comes_first(tenant: TenantId, load: list[int]) -> None:
    routing = Routing(replicas(5))
    in_flight = dict(zip(routing.names, load, strict=True))
    quiet, order = routing.order(tenant, None, {}), routing.order(tenant, None, in_flight)
    one, two = sorted(quiet[:2], key=order.index)
    assert in_flight[one] <= in_flight[two]
    if in_flight[one] == in_flight[two]:
        assert (one, two) == tuple(quiet[:2])


@given(tenant=NAMES, load=LOADS)
def test_a_third_engine_helps_where_both_equals_are_much_busier(
    tenant: TenantId, load: list[int]
) -> None:
    routing = Routing(replicas(5))
    in_flight = dict(zip(routing.names, load, strict=True))
    quiet, first = routing.order(tenant, None, {}), routing.order(tenant, None, in_flight)[0]
    less = min(in_flight[name] for name in quiet[:2]) - min(load)
    assert (first in quiet[:2]) == (less <= 8)
    if first not in quiet[:2]:
        assert in_flight[first] == min(load)


@given(tenant=NAMES, warm=st.integers(0, 4), kilobytes=st.integers(1, 200), busy=st.integers(0, 60))
def test_a_warm_engine_comes_first_until_it_is_busier_than_computing_takes(
    tenant: TenantId, warm: int, kilobytes: int, busy: int
) -> None:
    routing = Routing(replicas(5))
    name = routing.names[warm]
    order = routing.order(tenant, None, {name: busy}, {name: 1024 * kilobytes})
    ahead = 4096 * busy - 1024 * kilobytes
    if ahead:
        assert (order[0] == name) == (ahead < 0)


@given(tenant=NAMES, session=st.text(min_size=1), warm=st.integers(0, 4))
def test_a_session_stays_at_home_whatever_is_warm(
    tenant: TenantId, session: str, warm: int
) -> None:
    routing = Routing(replicas(5))
    order = routing.order(tenant, session, {}, {routing.names[warm]: 2**20})
    assert order == routing.order(tenant, session, {})


@given(tenant=NAMES, session=SESSIONS, gone=st.integers(0, 4))
def test_only_what_lived_there_moves_when_an_engine_goes(
    tenant: TenantId, session: str | None, gone: int
) -> None:
    specs = replicas(5)
    before = Routing(specs).order(tenant, session, {})
    specs.pop(gone)
    after = Routing(specs).order(tenant, session, {})
    assert list(after) == [name for name in before if name != f"shared-{gone}"]


def test_sessions_are_spread_evenly() -> None:
    routing = Routing(replicas(4))
    homes = Counter(
        routing.order(TenantId("acme"), f"chat-{number}", {})[0] for number in range(4000)
    )
    assert min(homes.values()) > 850
    assert max(homes.values()) < 1150

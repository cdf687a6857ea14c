"""Who gives back running tokens first."""

from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.tenancy.retraction import retraction_order
from sglang_ext.types import Owner, OwnerLimits

A, B, C = Owner("t:a"), Owner("t:b"), Owner("t:c")


def order(
    requests: list[tuple[Owner, int]],
    limits: dict[Owner, OwnerLimits] | None = None,
    capacity: int = 300,
) -> list[Owner]:
    fixed = {
        owner: sum(tokens for who, tokens in requests if who == owner) for owner, _ in requests
    }
    known = limits or {}
    places = retraction_order(
        requests, fixed, lambda owner: known.get(owner, OwnerLimits()), capacity
    )
    return [requests[place][0] for place in places]


def test_the_furthest_over_its_share_gives_until_another_is_further() -> None:
    requests = [(A, 60), (A, 60), (A, 60), (B, 100), (B, 100), (C, 20)]
    assert order(requests) == [B, A, A, B, A, C]


def test_an_owners_own_requests_go_from_the_last_to_the_first() -> None:
    requests = [(A, 10), (A, 20), (A, 30)]
    assert retraction_order(requests, {A: 60}, lambda owner: OwnerLimits(), 30) == [2, 1, 0]


def test_basic_gives_before_premium_that_is_further_above() -> None:
    requests = [(A, 200), (B, 110), (C, 10)]
    limits = {A: OwnerLimits(rank=2), B: OwnerLimits(rank=0)}
    assert order(requests, limits) == [B, A, C]


def test_basic_below_its_share_is_spared_while_premium_is_above() -> None:
    requests = [(A, 150), (A, 100), (B, 50)]
    limits = {A: OwnerLimits(rank=2), B: OwnerLimits(rank=0)}
    assert order(requests, limits) == [A, A, B]


def test_a_reserve_and_a_weight_belong_to_the_share() -> None:
    requests = [(A, 150), (B, 120)]
    assert order(requests)[0] == A
    assert order(requests, {A: OwnerLimits(reserve=100)})[0] == B
    assert order(requests, {A: OwnerLimits(weight=3.0)})[0] == B


requests_of = st.lists(st.tuples(st.sampled_from([A, B, C]), st.integers(0, 100)), max_size=30)


@given(requests_of)
def test_every_request_has_its_place(requests: list[tuple[Owner, int]]) -> None:
    places = retraction_order(requests, {}, lambda owner: OwnerLimits(), 100)
    assert sorted(places) == list(range(len(requests)))

"""Rule 1: who has an expired leaf gives first, unless all that it has is reserved for it."""

from itertools import permutations
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.radix.expiry import ExpiredFirst
from sglang_ext.radix.order import LeastRecent, Reason
from sglang_ext.types import Owner

A, B, C = Owner("t:a"), Owner("t:b"), Owner("t:c")


class World:
    """Owners with the stamp of their oldest leaf, who is expired and who may not give."""

    def __init__(self, stamps: dict[Owner, float]) -> None:
        self.stamps = stamps
        self.expired: set[Owner] = set()
        self.reserved: set[Owner] = set()
        self.candidates: set[Owner] = set()
        self.order = ExpiredFirst(
            LeastRecent(),
            self.candidates,
            self.expired.__contains__,
            lambda owner: owner not in self.reserved,
        )
        for owner, stamp in stamps.items():
            self.order.lowered(owner, stamp)

    def expire(self, *owners: Owner) -> None:
        self.expired.update(owners)
        self.candidates.update(owners)

    def touch(self, owner: Owner, stamp: float) -> None:
        self.stamps[owner] = stamp

    def take(self, step: "Step") -> None:
        """Let one owner be as the step says, and note again who has expired leaves."""
        before = self.stamps.pop(step.owner, None)
        if step.stamp is not None:
            self.stamps[step.owner] = step.stamp
            if before is None or step.stamp < before:
                self.order.lowered(step.owner, step.stamp)
        for states, is_so in ((self.expired, step.expired), (self.reserved, step.reserved)):
            (states.add if is_so else states.discard)(step.owner)
        self.expire(*self.expired)

    def first(self) -> tuple[Owner | None, Reason | None]:
        owner = self.order.first(self.stamps.get)
        return owner, None if owner is None else self.order.terms(owner).reason


def test_without_an_expired_leaf_the_strategy_behind_it_decides() -> None:
    assert World({A: 2.0, B: 1.0}).first() == (B, Reason.PRESSURE)
    assert World({}).first() == (None, None)


def test_an_expired_leaf_goes_before_an_older_one() -> None:
    world = World({A: 2.0, B: 1.0})
    world.expire(A)
    assert world.first() == (A, Reason.TTL)


@pytest.mark.parametrize("noted", permutations((A, B)))
def test_of_several_the_one_not_used_for_longest_gives(noted: tuple[Owner, ...]) -> None:
    world = World({A: 3.0, B: 2.0, C: 1.0})
    for owner in noted:
        world.expire(owner)
    assert world.first() == (B, Reason.TTL)
    world.touch(B, 4.0)
    assert world.first() == (A, Reason.TTL)


def test_an_older_leaf_that_joins_counts_at_once() -> None:
    world = World({A: 3.0, B: 2.0})
    world.expire(A, B)
    assert world.first() == (B, Reason.TTL)
    world.touch(A, 1.0)
    world.order.lowered(A, 1.0)
    assert world.first() == (A, Reason.TTL)


class Step(NamedTuple):
    owner: Owner
    stamp: float | None
    expired: bool
    reserved: bool


STEPS = st.builds(
    Step,
    st.sampled_from((A, B, C)),
    st.none() | st.integers(1, 9).map(float),
    st.booleans(),
    st.booleans(),
)


@given(st.lists(STEPS, max_size=30))
def test_as_a_search_through_all_owners_finds_it(steps: list[Step]) -> None:
    world = World({})
    for step in steps:
        world.take(step)
        found = [
            (stamp, owner)
            for owner, stamp in world.stamps.items()
            if owner in world.expired - world.reserved
        ]
        if found:
            assert world.first() == (min(found)[1], Reason.TTL)
        else:
            assert world.first()[1] in (Reason.PRESSURE, None)


def test_who_was_used_since_or_has_no_leaf_left_falls_out() -> None:
    world = World({A: 2.0, B: 1.0})
    world.expire(A, C)
    world.expired.discard(A)
    assert world.first() == (B, Reason.PRESSURE)
    assert not world.candidates


def test_what_is_reserved_stays_though_its_time_is_over() -> None:
    world = World({A: 2.0, B: 1.0})
    world.expire(A)
    world.reserved.add(A)
    assert world.first() == (B, Reason.PRESSURE)

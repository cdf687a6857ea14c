"""Rule 1: who has an expired leaf gives first, unless all that it has is reserved for it."""

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
        self.candidates: dict[Owner, None] = {}
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
        self.candidates.update(dict.fromkeys(owners))

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


def test_the_first_of_several_is_the_same_on_every_rank() -> None:
    world = World({A: 3.0, B: 2.0, C: 1.0})
    world.expire(B)
    world.expire(A)
    assert world.first() == (B, Reason.TTL)


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

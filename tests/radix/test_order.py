"""The order of leaves against a plain sorted list."""

from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

import pytest

from sglang_ext.radix.order import LeafOrder, LeastRecent, SortedEntries
from sglang_ext.types import Owner


@dataclass(eq=False)
class FakeLeaf:
    id: int
    owner: Owner
    last_access_time: float
    filed: float = field(default=0.0)


def make_leaves(number: int, owners: int = 3) -> list[FakeLeaf]:
    return [FakeLeaf(i, Owner(f"t:{i % owners}"), float(i)) for i in range(number)]


def drained(order: LeafOrder) -> list[Any]:
    """Take the oldest leaf until none is left."""
    leaves = []
    while (leaf := order.oldest()) is not None:
        leaves.append(leaf)
        order.discard(leaf)
    return leaves


@pytest.mark.parametrize("owners", [1, 3, 50])
@pytest.mark.parametrize("seed", range(8))
def test_random_adds_touches_and_discards_leave_in_order_of_stamp(owners: int, seed: int) -> None:
    random, clock = Random(seed), count(1000)
    order, leaves = LeafOrder(LeastRecent()), make_leaves(200, owners)
    inside: set[FakeLeaf] = set()
    for _ in range(4000):
        leaf = random.choice(leaves)
        kind = random.choice(["add", "touch", "discard", "oldest"])
        if kind == "add":
            order.add(leaf)
            inside.add(leaf)
        elif kind == "touch":
            leaf.last_access_time = float(next(clock))
            if leaf in order:
                order.touch(leaf)
        elif kind == "discard":
            order.discard(leaf)
            inside.discard(leaf)
        else:
            stamps = [other.last_access_time for other in inside]
            oldest = order.oldest()
            assert (oldest is None) == (not inside)
            assert oldest is None or oldest.last_access_time == min(stamps)
    assert order == inside
    assert drained(order) == sorted(inside, key=lambda leaf: leaf.last_access_time)
    assert not order
    assert not order.by_owner()


def test_adding_again_files_under_the_new_stamp() -> None:
    order, leaves = LeafOrder(LeastRecent()), make_leaves(3, owners=1)
    for leaf in leaves:
        order.add(leaf)
    leaves[0].last_access_time = 99.0
    order.add(leaves[0])
    assert drained(order) == [leaves[1], leaves[2], leaves[0]]


def test_a_leaf_that_joins_late_goes_before_younger_ones_of_all_owners() -> None:
    order, leaves = LeafOrder(LeastRecent()), make_leaves(6)
    for leaf in leaves[1:]:
        order.add(leaf)
    order.add(leaves[0])
    assert drained(order) == leaves


def test_equal_stamps_leave_by_id() -> None:
    order = LeafOrder(LeastRecent())
    leaves = [FakeLeaf(i, Owner("t:a"), 1.0) for i in range(3)]
    order.add(FakeLeaf(9, Owner("t:a"), 2.0))
    for leaf in reversed(leaves):
        order.add(leaf)
    assert [leaf.id for leaf in drained(order)] == [0, 1, 2, 9]


def test_sorted_entries_stay_sorted_over_many_chunks() -> None:
    random, entries = Random(5), SortedEntries()
    made: list[Any] = [(float(random.randrange(10**6)), i, None) for i in range(20_000)]
    for entry in made:
        entries.add(entry)
    assert list(entries) == sorted(made)
    random.shuffle(made)
    for entry in made[:15_000]:
        entries.remove(entry)
    assert list(entries) == sorted(made[15_000:])
    assert entries.oldest() == min(made[15_000:])


def test_the_heap_of_owners_stays_as_small_as_the_owners() -> None:
    strategy = LeastRecent()
    order, leaves, clock = LeafOrder(strategy), make_leaves(300, owners=10), count(1000)
    for leaf in leaves:
        order.add(leaf)
    for _ in range(5_000):
        leaf = order.oldest()
        order.discard(leaf)
        leaf.last_access_time = float(next(clock))
        order.add(leaf)
    assert len(strategy._heap) <= 2 * 10

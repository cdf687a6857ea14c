"""Whose leaf goes next: the order against a naive one that reads everything anew, and its cost."""

from collections import Counter
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest

from sglang_ext.radix.eviction import FairOrder, OwnerHeap
from sglang_ext.radix.ledger import Ledger
from sglang_ext.radix.order import LeafOrder, LeastRecent, Reason
from sglang_ext.radix.shares import Shares
from sglang_ext.types import PUBLIC, Owner, OwnerLimits, Tier

OWNERS = [Owner(f"t:{name}") for name in "abcdefgh"]
PAGE = 4
CAPACITY = 400


@dataclass(eq=False)
class FakeLeaf:
    """A leaf of an owner, of so many tokens."""

    id: int
    owner: Owner
    tokens: int
    last_access_time: float


class Flat:
    """A tier of leaves without a tree: a ledger, an order, and the limits that it follows."""

    def __init__(self, limits: dict[Owner, OwnerLimits], capacity: int = CAPACITY) -> None:
        self.limits, self.capacity = limits, capacity
        self.reserved = sum(limit.reserve for limit in limits.values())
        self.ledger = Ledger()
        self.shares = Shares(self.ledger, Tier.HBM, self.limit_of, capacity, self.reserved, PAGE)
        self.strategy = FairOrder(self.shares)
        self.order = LeafOrder(self.strategy)
        self.leaves: list[FakeLeaf] = []
        self.clock = 0

    def limit_of(self, owner: Owner) -> OwnerLimits:
        return self.limits.get(owner, OwnerLimits())

    def add(self, owner: Owner, pages: int = 1) -> FakeLeaf:
        self.clock += 1
        leaf = FakeLeaf(self.clock, owner, pages * PAGE, self.clock)
        self.ledger.book(owner, Tier.HBM, leaf.tokens, 0)
        self.order.add(leaf)
        self.leaves.append(leaf)
        return leaf

    def remove(self, leaf: FakeLeaf, protected: bool = False) -> None:
        """Take a leaf away, or lock it."""
        self.ledger.book(leaf.owner, Tier.HBM, -leaf.tokens, leaf.tokens if protected else 0)
        self.order.discard(leaf)
        self.leaves.remove(leaf)

    def touch(self, leaf: FakeLeaf) -> None:
        self.clock += 1
        leaf.last_access_time = self.clock
        self.order.touch(leaf)

    # ---- the same questions, answered by reading everything

    def held(self, owner: Owner) -> int:
        return self.ledger.usage(owner, Tier.HBM).tokens + self.shares.incoming.get(owner, 0)

    def spare(self, owner: Owner) -> int:
        usage, reserve = self.ledger.usage(owner, Tier.HBM), self.limit_of(owner).reserve
        kept = max(0, reserve - self.held(owner) + usage.evictable)
        while kept % PAGE:
            kept += 1
        return max(0, usage.evictable - kept)

    def fair_share(self, owner: Owner) -> float | None:
        """Return the share in tokens, None for who is not measured."""
        owners = {owner for owner, _, _ in self.ledger} | set(self.shares.incoming)
        present = {
            owner for owner in owners if self.limit_of(owner).quota is not None and self.held(owner)
        }
        if owner not in present:
            return None
        weights = sum(self.limit_of(other).weight for other in present)
        mine = self.limit_of(owner)
        return mine.reserve + (self.capacity - self.reserved) * mine.weight / weights

    def naive(self) -> Owner | None:
        """Return who gives next by rules 2 to 5 of the order, O(owners x leaves)."""
        oldest: dict[Owner, float] = {}
        for leaf in self.leaves:
            stamp = oldest.get(leaf.owner, leaf.last_access_time)
            oldest[leaf.owner] = min(stamp, leaf.last_access_time)
        givers = [owner for owner in sorted(oldest) if self.spare(owner)]
        above_quota = {}
        above_share = {}
        for owner in givers:
            limits, share = self.limit_of(owner), self.fair_share(owner)
            if limits.quota is not None and self.held(owner) > limits.quota:
                above_quota[owner] = self.held(owner) - limits.quota
            if share is not None and self.held(owner) > share:
                for_weight = (self.held(owner) - limits.reserve) / limits.weight
                above_share[owner] = (-limits.rank, for_weight)
        if above_quota:
            return max(above_quota, key=lambda owner: above_quota[owner])
        if above_share:
            return max(above_share, key=lambda owner: above_share[owner])
        inside = givers or [owner for owner in oldest if owner in self.shares.requesters]
        return min(inside, key=lambda owner: oldest[owner], default=None)


def random_limits(random: Random) -> dict[Owner, OwnerLimits]:
    limits = {}
    for owner in OWNERS:
        reserve = random.choice([0, 0, 10, 30])
        quota = random.choice([None, reserve + 20, 100, 200])
        weight = random.choice([0.25, 1.0, 1.0, 3.0])
        limits[owner] = OwnerLimits(quota, False, reserve, weight, random.randrange(3))
    limits[PUBLIC] = OwnerLimits()
    return limits


def random_step(flat: Flat, random: Random) -> None:
    kind = random.choice(["add", "add", "add", "touch", "lock", "run", "ask", "evict"])
    if kind == "add" and len(flat.leaves) < 60:
        flat.add(random.choice([*OWNERS, PUBLIC]), random.randint(1, 5))
    elif kind == "run":
        owners = random.sample(OWNERS, 3)
        flat.ledger.set_running({owner: random.randint(0, 40) for owner in owners})
    elif kind == "ask":
        asking = random.sample(OWNERS, random.randint(0, 3))
        flat.shares._ask({owner: random.choice([0, 5, 40]) for owner in asking})
    elif not flat.leaves:
        return
    elif kind == "touch":
        flat.touch(random.choice(flat.leaves))
    elif kind == "lock":
        flat.remove(random.choice(flat.leaves), protected=random.random() < 0.5)
    elif (leaf := flat.order.oldest()) is not None:
        flat.remove(leaf)


@pytest.mark.parametrize("seed", range(20))
def test_victims_are_those_of_the_naive_order(seed: int) -> None:
    random = Random(seed)
    flat = Flat(random_limits(random))
    rules: Counter[str] = Counter()
    for _ in range(1500):
        random_step(flat, random)
        expected, leaf = flat.naive(), flat.order.oldest()
        assert (None if leaf is None else leaf.owner) == expected
        if leaf is not None:
            terms = flat.strategy.terms(leaf.owner)
            assert terms.most == (flat.spare(leaf.owner) or None)
            rules[terms.reason] += 1
        asked = flat.shares.requesters
        kept = {owner: _floor(flat, owner) for owner in OWNERS if owner not in asked}
        public = flat.ledger.usage(PUBLIC, Tier.HBM).evictable if any(kept.values()) else 0
        assert flat.shares.withheld() == sum(kept.values()) + public
    assert min(rules[Reason.QUOTA], rules[Reason.PRESSURE]) > 30


def _floor(flat: Flat, owner: Owner) -> int:
    return flat.ledger.usage(owner, Tier.HBM).evictable - flat.spare(owner)


@pytest.mark.parametrize("seed", range(5))
def test_without_limits_the_victims_are_those_of_least_recent(seed: int) -> None:
    random = Random(seed)
    flat = Flat({})
    plain = LeafOrder(LeastRecent())
    for _ in range(1500):
        random_step(flat, random)
        for leaf in set(plain) - set(flat.order):
            plain.discard(leaf)
        for leaf in flat.order:
            plain.add(leaf)
        assert flat.order.oldest() is plain.oldest()


def test_the_furthest_above_its_quota_gives_first() -> None:
    a, b, c = OWNERS[:3]
    flat = Flat({a: OwnerLimits(40), b: OwnerLimits(40), c: OwnerLimits(200)})
    for owner, pages in ((c, 30), (a, 12), (b, 15)):
        for _ in range(pages):
            flat.add(owner)
    gave = []
    for _ in range(7):
        leaf: Any = flat.order.oldest()
        gave.append(leaf.owner)
        assert flat.strategy.terms(leaf.owner).reason is Reason.QUOTA
        flat.remove(leaf)
    assert Counter(gave) == {b: 5, a: 2}
    assert gave[:3] == [b, b, b]
    rest: Any = flat.order.oldest()
    assert flat.strategy.terms(rest.owner).reason is Reason.PRESSURE


def test_basic_gives_before_standard_before_premium() -> None:
    owners = OWNERS[:3]
    limits = {owner: OwnerLimits(400, rank=rank) for rank, owner in enumerate(owners)}
    flat = Flat(limits, capacity=120)
    for owner in reversed(owners):
        for _ in range(12):
            flat.add(owner)
    gave = []
    for _ in range(6):
        leaf: Any = flat.order.oldest()
        gave.append(leaf.owner)
        flat.remove(leaf)
    assert gave == [owners[0]] * 2 + [owners[1]] * 2 + [owners[2]] * 2


def test_an_owner_without_leaves_is_asked_again_when_it_has_one() -> None:
    a, b = OWNERS[:2]
    flat = Flat({a: OwnerLimits(8), b: OwnerLimits(400)})
    leaf = flat.add(a, 5)
    flat.add(b)
    flat.order.discard(leaf)
    assert flat.order.oldest().owner == b
    flat.order.add(leaf)
    assert flat.order.oldest().owner == a


def test_owner_heap_stays_small() -> None:
    heap = OwnerHeap()
    for number in range(10_000):
        heap.file(OWNERS[number % 4], number)
    assert heap.largest() == OWNERS[9_999 % 4]
    assert len(heap._heap) <= 2 * 4 + 17
    for owner in OWNERS:
        heap.file(owner, None)
    assert heap.largest() is None


class CountingName(str):
    """An owner's name that counts how often it is hashed or compared."""

    calls = 0

    def __hash__(self) -> int:
        CountingName.calls += 1
        return str.__hash__(self)

    def __eq__(self, other: object) -> bool:
        CountingName.calls += 1
        return str.__eq__(self, other)


def cost_of_a_victim(owners: int, victims: int) -> float:
    """Return the uses of owners' names for each victim, with every owner above its quota."""
    names = [Owner(CountingName(f"t:{number}")) for number in range(owners)]
    limits = {
        name: OwnerLimits(PAGE * (number % 3), False, 0, 1.0, number % 3)
        for number, name in enumerate(names)
    }
    flat = Flat(limits, capacity=owners * 8 * PAGE)
    for _ in range(8):
        for name in names:
            flat.add(name)
    assert flat.order.oldest() is not None
    CountingName.calls = 0
    for _ in range(victims):
        leaf = flat.order.oldest()
        flat.order.discard(leaf)
        flat.ledger.book(leaf.owner, Tier.HBM, -leaf.tokens, 0)
    return CountingName.calls / victims


def test_a_victim_costs_no_more_with_a_thousand_tenants() -> None:
    few, many = cost_of_a_victim(10, 60), cost_of_a_victim(1000, 6000)
    assert many < 2 * few, f"{many:.0f} name uses a victim with 1,000 owners, {few:.0f} with 10"


def test_new_limits_file_everything_again() -> None:
    a, b = OWNERS[:2]
    flat = Flat({})
    flat.add(b, 3)
    flat.add(a, 3)
    assert flat.order.oldest().owner == b
    flat.limits = {a: OwnerLimits(4), b: replace(OwnerLimits(), quota=400)}
    flat.shares = Shares(flat.ledger, Tier.HBM, flat.limit_of, CAPACITY, 0, PAGE)
    flat.order.use(FairOrder(flat.shares))
    assert flat.order.oldest().owner == a

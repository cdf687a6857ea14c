"""Quotas of the shared store hold over all machines together."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.tiering.caps import Caps, Limit
from sglang_ext.tiering.page_format import HEADER_BYTES
from sglang_ext.tiering.remote_holdings import Holdings
from sglang_ext.tiering.remote_memory import MemoryObjects, Shelf
from sglang_ext.tiering.remote_names import HeldPage, held_pages
from sglang_ext.tiering.remote_store import RemoteStore
from sglang_ext.types import Owner
from tests.tiering.remotes import make_remote
from tests.tiering.stores import ALICE, BOB, BODY_BYTES, FINGERPRINT, get, put, refs_of

PAGE = HEADER_BYTES + BODY_BYTES
CAROL = Owner("t:carol")


def caps(pages: int, **limits: Limit) -> Caps:
    owners = {"alice": ALICE, "bob": BOB, "carol": CAROL}
    return Caps(
        total_bytes=pages * PAGE, limits={owners[name]: limit for name, limit in limits.items()}
    )


def hard(pages: int) -> Limit:
    return Limit(quota_bytes=pages * PAGE, hard=True)


class Machines:
    def __init__(self, held: Caps, count: int = 2) -> None:
        self.shelf = Shelf()
        self.stores = [self.another(held) for _ in range(count)]

    def another(self, held: Caps) -> RemoteStore:
        return make_remote(MemoryObjects(self.shelf), caps=held, page_bytes=BODY_BYTES)

    def refresh(self) -> None:
        for store in self.stores:
            store.refresh()

    def held(self, owner: Owner) -> int:
        return sum(page.owner == owner for page in held_pages(self.shelf.objects))

    def close(self) -> None:
        for store in self.stores:
            store.check_integrity()
            store.close()


@pytest.fixture
def machines(request: pytest.FixtureRequest) -> Iterator[Machines]:
    machines = Machines(request.param)
    yield machines
    machines.close()


@pytest.mark.parametrize("machines", [caps(100, alice=hard(8))], indirect=True)
def test_a_hard_quota_counts_what_every_machine_wrote(machines: Machines) -> None:
    first, second = machines.stores
    assert all(put(first, refs_of(ALICE, range(6))))
    machines.refresh()
    assert all(put(second, refs_of(ALICE, range(100, 106))))
    assert machines.held(ALICE) == 8
    assert all(get(second, refs_of(ALICE, range(100, 106)))), "the newest stay"


@pytest.mark.parametrize("machines", [caps(100, alice=hard(0))], indirect=True)
def test_a_quota_of_nothing_stores_nothing(machines: Machines) -> None:
    assert not any(put(machines.stores[0], refs_of(ALICE, range(3))))
    assert machines.stores[0].counters["no_room"] == 3
    assert machines.held(ALICE) == 0


@pytest.mark.parametrize("machines", [caps(10, alice=Limit(quota_bytes=5 * PAGE))], indirect=True)
def test_idle_room_is_lent_and_given_back(machines: Machines) -> None:
    first, second = machines.stores
    assert all(put(first, refs_of(ALICE, range(10))))
    machines.refresh()
    assert all(put(second, refs_of(BOB, range(4))))
    assert (machines.held(ALICE), machines.held(BOB)) == (6, 4)


@pytest.mark.parametrize(
    "machines",
    [caps(10, alice=Limit(quota_bytes=0, reserve_bytes=4 * PAGE), bob=Limit(quota_bytes=2 * PAGE))],
    indirect=True,
)
def test_a_reserve_is_kept_from_others(machines: Machines) -> None:
    first, second = machines.stores
    put(first, refs_of(ALICE, range(6)))
    machines.refresh()
    put(second, refs_of(BOB, range(20)))
    assert machines.held(ALICE) == 4
    assert machines.held(BOB) <= 6


@pytest.mark.parametrize("machines", [caps(10)], indirect=True)
def test_the_whole_store_is_never_above_its_cap(machines: Machines) -> None:
    for number in range(12):
        store = machines.stores[number % 2]
        put(store, refs_of(Owner(f"t:{number % 3}"), range(number * 10, number * 10 + 4)))
        machines.refresh()
        assert len(machines.shelf.objects) <= 10


@pytest.mark.parametrize("machines", [caps(100)], indirect=True)
def test_a_new_machine_counts_what_was_there(machines: Machines) -> None:
    put(machines.stores[0], refs_of(ALICE, range(5)))
    store = machines.another(caps(100, alice=hard(5)))
    assert store.usage(ALICE) == 5 * PAGE
    assert all(put(store, refs_of(ALICE, [9])))
    assert machines.held(ALICE) == 5
    store.close()


@pytest.mark.parametrize("machines", [caps(100)], indirect=True)
def test_pages_of_other_models_and_ranks_count_too(machines: Machines) -> None:
    put(machines.stores[0], refs_of(ALICE, range(5)))
    other = make_remote(
        MemoryObjects(machines.shelf),
        fingerprint=replace(FINGERPRINT, model_id="other"),
        page_bytes=100,
    )
    assert not any(get(other, refs_of(ALICE, range(5)), 100))
    assert other.usage(ALICE) == 5 * PAGE
    put(other, refs_of(ALICE, range(5)), 100)
    machines.refresh()
    assert machines.stores[0].usage(ALICE) == 5 * PAGE + 5 * (HEADER_BYTES + 100)
    assert other.delete_owner(ALICE) > 0
    assert machines.held(ALICE) == 0
    other.close()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["add", "touch", "forget", "settle"]), st.integers(0, 9)))
)
def test_the_books_are_what_a_list_says(steps: list[tuple[str, int]]) -> None:
    holdings, there, now = Holdings(), {}, 0.0
    for action, number in steps:
        now += 1
        owner = Owner(f"t:{number % 3}")
        page = HeldPage(f"page-{number}", owner, 10)
        if action == "add":
            there[page.name] = page
            holdings.add(page, now)
        elif action == "touch":
            holdings.touch(owner, page.name, now)
        elif action == "forget" and page.name in there:
            del there[page.name]
            holdings.forget(page)
        elif action == "settle":
            holdings.settle(there.values(), now)
        holdings.check_integrity()
        assert holdings.total == 10 * len(there)
        for name in {page.owner for page in there.values()}:
            mine = {page.name for page in there.values() if page.owner == name}
            assert set(holdings.oldest(name, 99)) == mine

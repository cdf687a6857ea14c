"""Keys that machines share: one an owner, nobody else's, and destroyed everywhere."""

from dataclasses import replace

import pytest

from sglang_ext.tiering.remote_keys import SharedKeys
from sglang_ext.tiering.remote_memory import MemoryObjects, Shelf
from sglang_ext.tiering.remote_names import held_pages
from tests.tiering.remotes import make_remote
from tests.tiering.stores import (
    ALICE,
    BOB,
    BODY_BYTES,
    FINGERPRINT,
    MASTER,
    FakeClock,
    body_of,
    get,
    put,
    refs_of,
)

REFS = refs_of(ALICE, range(3))


def test_two_machines_have_one_key() -> None:
    shelf = Shelf()
    one, two = (SharedKeys(MemoryObjects(shelf), MASTER) for _ in range(2))
    first, second = one.find_or_make(ALICE), two.find_or_make(ALICE)
    assert first is not None and second is not None
    assert first.blind(b"x") == second.blind(b"x")
    other = two.find_or_make(BOB)
    assert other is not None and other.blind(b"x") != first.blind(b"x")


def test_with_another_master_key_there_is_none_and_it_is_not_replaced() -> None:
    shelf = Shelf()
    assert SharedKeys(MemoryObjects(shelf), MASTER).find_or_make(ALICE) is not None
    before = dict(shelf.objects)
    assert SharedKeys(MemoryObjects(shelf), bytes(32)).find_or_make(ALICE) is None
    assert shelf.objects == before


def test_a_key_that_another_machine_destroyed_is_used_no_more() -> None:
    shelf, clock = Shelf(), FakeClock()
    one, two = (SharedKeys(MemoryObjects(shelf), MASTER, clock) for _ in range(2))
    before = one.find_or_make(ALICE)
    assert before is not None and two.find(ALICE) is not None
    one.destroy(ALICE)
    clock.now += 11
    assert two.find(ALICE) is None
    after = two.find_or_make(ALICE)
    assert after is not None and after.blind(b"x") != before.blind(b"x")


def test_a_silent_store_has_no_keys() -> None:
    shelf = Shelf()
    keys = SharedKeys(MemoryObjects(shelf), MASTER)
    shelf.silent = True
    assert keys.find(ALICE) is None
    assert keys.find_or_make(ALICE) is None


@pytest.mark.trial(72)
def test_the_store_sees_neither_bodies_nor_hashes_of_prompts() -> None:
    shelf = Shelf()
    store = make_remote(MemoryObjects(shelf), encrypted=True)
    put(store, REFS)
    everything = b"".join([*shelf.objects.values(), *map(str.encode, shelf.objects)])
    for ref in REFS:
        assert body_of(ref)[:32] not in everything
        assert ref.key not in everything
        assert ref.key.hex().encode() not in everything
    store.close()


@pytest.mark.trial(72)
def test_a_copy_of_the_store_is_worthless_once_the_owner_is_deleted() -> None:
    shelf = Shelf()
    store = make_remote(MemoryObjects(shelf), encrypted=True)
    put(store, REFS)
    copy = {page.name: shelf.objects[page.name] for page in held_pages(shelf.objects)}
    store.delete_owner(ALICE)
    assert not any(name.startswith("sgx1-keys") for name in shelf.objects)
    assert not list(held_pages(shelf.objects))
    put(store, refs_of(ALICE, [9]))
    shelf.objects.update(copy)
    assert not any(get(store, REFS))
    store.close()


@pytest.mark.parametrize("first", [False, True])
def test_what_lies_in_the_other_form_goes_when_the_policy_changes(first: bool) -> None:
    shelf = Shelf()
    asked = {ALICE} if first else set()
    store = make_remote(MemoryObjects(shelf), encrypted=True)
    store.close()
    store = type(store)(
        replace(store.config, encrypted=lambda owner: owner in asked),
        MemoryObjects(shelf),
        MASTER,
        FakeClock(),
        background=False,
    )
    store.start()
    put(store, [*REFS, *refs_of(BOB, range(2))])
    asked.symmetric_difference_update({ALICE})
    store.start(encryption_changed=True)
    assert not any(get(store, REFS)), "nothing is used until it is settled"
    store.refresh()
    assert store.owners() == [BOB]
    assert put(store, REFS) == [True] * 3
    assert get(store, [*REFS, *refs_of(BOB, range(2))]) == [True] * 5
    store.refresh()
    assert all(get(store, REFS))
    store.close()


def test_another_format_is_another_name() -> None:
    """An engine of another release, model, dtype or rank finds nothing, and damages nothing."""
    shelf = Shelf()
    store = make_remote(MemoryObjects(shelf))
    put(store, REFS)
    for change in ({"kv_dtype": "fp8"}, {"tp_rank": 1, "tp_size": 2}, {"weights_hash": "other"}):
        other = make_remote(MemoryObjects(shelf), fingerprint=replace(FINGERPRINT, **change))
        assert not any(get(other, REFS))
        other.close()
    other = make_remote(MemoryObjects(shelf), page_bytes=BODY_BYTES + 1)
    assert not any(get(other, REFS))
    other.close()
    assert all(get(store, REFS))
    store.close()

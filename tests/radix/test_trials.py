"""Known failures of prefix trees elsewhere, tried on ours; the numbers are those of the trials."""

import gc
import weakref
from random import Random

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_ext.radix.integrity import check_integrity, walk
from sglang_ext.types import PUBLIC, Owner, Tier
from tests.radix.caches import Rig, make_rig

PAGES = pytest.mark.parametrize("page_size", [1, 16, 64])


@PAGES
def test_trial_21_a_public_prompt_is_shared_and_private_tails_never_are(page_size: int) -> None:
    prompt = list(range(1, 1537))
    rig = make_rig(8192, page_size, [prompt])
    tail = [5000] * (2 * page_size)
    rig.insert(prompt + tail, "t:a")
    assert rig.hit(prompt + tail, "t:a") == 1536 + len(tail)
    assert rig.hit(prompt + tail, "t:b") == 1536
    rig.insert(prompt + tail, "t:b")
    assert rig.hit(prompt + tail, "t:b") == 1536 + len(tail)
    public = [node for node in walk(rig.core) if node.owner == PUBLIC]
    assert sum(len(node.key) for node in public) == 1536
    assert rig.core.ledger.usage(PUBLIC, Tier.HBM).tokens == 1536
    slots = [set(rig_slots(rig, prompt + tail, owner)[1536:]) for owner in ("t:a", "t:b")]
    assert not slots[0] & slots[1], "two tenants share private pages"
    check_integrity(rig.cache)


@PAGES
def test_a_sealed_owner_computes_public_text_for_itself_and_leaves_it_to_nobody(
    page_size: int,
) -> None:
    prompt = list(range(1, 129))
    rig = make_rig(1024, page_size, [prompt])
    rig.core.enable_storage = True
    text = prompt + [5000] * page_size
    rig.insert(text, "s:bank")
    assert [rig.hit(text, owner) for owner in ("s:bank", "t:a", "s:b")] == [len(text), 0, 0]
    rig.insert(text, "t:a")
    assert [rig.hit(text, owner) for owner in ("t:b", "s:b")] == [len(prompt), 0]
    assert rig.core.ledger.usage(Owner("s:bank"), Tier.HBM).tokens == len(text)
    hashes = {node.owner: set(node.hash_value) for node in walk(rig.core)}
    assert not hashes["s:bank"] & (hashes[PUBLIC] | hashes["t:a"])
    check_integrity(rig.cache)


@PAGES
def test_trial_77_nothing_is_counted_twice_after_a_burst(page_size: int) -> None:
    """The scheduler's idle check: available + evictable + protected is the whole pool."""
    rig, random = make_rig(64 * page_size, page_size), Random(77)
    for _ in range(300):
        text = [random.randint(1, 3) for _ in range(random.randint(0, 8) * page_size)]
        rig.insert(text, f"t:{random.randint(0, 3)}")
        assert rig.accounted() == rig.size
    assert rig.cache.protected_size() == 0
    rig.evict(rig.size)
    assert rig.allocator.available_size() == rig.size
    assert list(rig.core.ledger) == []


@PAGES
@pytest.mark.parametrize("with_prompt", [False, True])
def test_trial_78_prompts_of_every_length_around_a_page(page_size: int, with_prompt: bool) -> None:
    """Nothing is cut to zero, and sizes follow the pages held rather than the tokens asked for."""
    prompt = [9] * page_size if with_prompt else []
    for length in range(1, 2 * page_size + 2):
        rig = make_rig(16 * page_size, page_size, [prompt])
        text = prompt + [3] * length
        whole = len(text) // page_size * page_size
        rig.insert(text, "t:a")
        assert rig.hit(text, "t:a") == whole
        assert rig.cache.evictable_size() == whole
        held = sum(usage.tokens for _, _, usage in rig.core.ledger)
        assert held == whole
        check_integrity(rig.cache)
        assert rig.evict(1) >= min(whole, 1)
        assert rig.accounted() == rig.size


@PAGES
def test_trial_81_a_split_does_not_refresh_the_suffix(page_size: int) -> None:
    rig = make_rig(64 * page_size, page_size)
    old = [1] * page_size + [2] * page_size
    rig.insert(old, "t:a")
    rig.insert([5] * page_size, "t:b")
    assert rig.hit([1] * page_size, "t:a") == page_size
    rig.evict(1)
    assert rig.hit(old, "t:a") == page_size, "the suffix that nobody used should have gone first"
    assert rig.hit([5] * page_size, "t:b") == page_size


@PAGES
def test_trial_81_an_insert_that_splits_does_not_refresh_the_suffix_either(page_size: int) -> None:
    rig = make_rig(64 * page_size, page_size)
    rig.insert([1] * page_size + [2] * page_size, "t:a")
    rig.insert([5] * page_size, "t:b")
    leaf = next(node for node in walk(rig.core) if node.owner == "t:a")
    stamp, access_ms = leaf.last_access_time, leaf.access_ms
    rig.core.clock.now_ms += 1000
    rig.insert([1] * page_size + [3] * page_size, "t:a")
    assert (leaf.last_access_time, leaf.access_ms) == (stamp, access_ms)
    assert leaf.parent.access_ms == access_ms + 1000


def test_trial_83_splits_do_not_keep_the_memory_of_what_they_split_from() -> None:
    rig, random = make_rig(4096, 16), Random(83)
    for _ in range(400):
        text = [token for token in random.choices([1, 2], k=8) for _ in range(16)]
        rig.insert(text[: random.randint(1, 8) * 16], f"t:{random.randint(0, 2)}")
        rig.evict(16 if random.random() < 0.3 else 0)
    allocated = {}
    used = 0
    for node in walk(rig.core):
        value = node.component_data[0].value
        storage = value.untyped_storage()
        allocated[storage.data_ptr()] = storage.nbytes()
        used += value.numel() * value.element_size()
    assert sum(allocated.values()) < 2 * used


def test_trial_83_evicted_nodes_are_freed_at_once() -> None:
    rig = make_rig(1024, 16)
    rig.insert([1] * 64, "t:a")
    node = weakref.ref(next(walk(rig.core)))
    rig.cache.evict(EvictParams(num_tokens=64))
    gc.collect()
    assert node() is None


def rig_slots(rig: Rig, tokens: list[int], owner: str) -> list[int]:
    found = rig.match(tokens, owner)
    indices = rig.core.collect_full_device_indices(found.last_device_node, rig.core.root_node.id)
    return list(indices.tolist())

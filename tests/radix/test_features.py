"""SGLang's own features on our tree: bigram keys of EAGLE, sliding windows beside full KV."""

from random import Random

import pytest
import torch
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_ext.cache_backend import register_backend
from sglang_ext.prefix_cache import TenantRadixCache
from sglang_ext.radix.component import TenantFullComponent
from sglang_ext.radix.integrity import check_integrity, walk
from sglang_ext.radix.public import PublicPrefixes
from sglang_ext.types import PUBLIC, Tier
from tests.radix.caches import Rig, make_params, make_rig

POOL, WINDOW = 256, 8
PROMPT = [7] * 24


@pytest.mark.parametrize(("page_size", "public"), [(1, 23), (4, 20)])
def test_eagle_shares_the_bigrams_that_lie_within_the_prompt(page_size: int, public: int) -> None:
    rig = make_rig(POOL, page_size, [PROMPT], is_eagle=True)
    text = PROMPT + [1] * 9
    for owner in ("t:a", "t:b"):
        slots = rig.alloc(32)
        rig.cache.insert(InsertParams(key=rig.key(text, owner), value=slots))
        check_integrity(rig.cache)
    assert [rig.hit(text, owner) for owner in ("t:a", "t:b", "t:c")] == [32, 32, public]
    assert rig.core.ledger.usage(PUBLIC, Tier.HBM).tokens == public
    assert rig.accounted() == rig.size


def make_window_rig() -> Rig:
    """Return a rig with a full and a sliding-window pool of POOL slots each."""
    register_backend()
    params = make_params(POOL, 1, sliding_window_size=WINDOW, tree_core_backend="sglang_ext")
    pool = SWAKVPool(POOL, POOL, 1, torch.bfloat16, 1, 8, [0], [1], "cpu")
    params.token_to_kv_pool_allocator = SWATokenToKVPoolAllocator(
        POOL, POOL, 1, torch.bfloat16, "cpu", pool, False
    )
    params.tree_components = (ComponentType.FULL, ComponentType.SWA)
    params.component_registry_override = {ComponentType.FULL: TenantFullComponent}
    return Rig(TenantRadixCache(params, PublicPrefixes([PROMPT], 1)))


def make_room(rig: Rig, tokens: int) -> None:
    full, window = rig.allocator.full_available_size(), rig.allocator.swa_available_size()
    rig.cache.evict(EvictParams(num_tokens=max(0, tokens - full)))
    rig.cache.evict(EvictParams(swa_num_tokens=max(0, tokens - window)))


def check_windows(rig: Rig) -> None:
    """SGLang's own check of both components, ours, and that neither pool lost a slot."""
    rig.core.sanity_check([], [])
    check_integrity(rig.cache)
    cache, allocator = rig.cache, rig.allocator
    full = cache.full_evictable_size() + cache.full_protected_size()
    window = cache.swa_evictable_size() + cache.swa_protected_size()
    assert allocator.full_available_size() + full == POOL
    assert allocator.swa_available_size() + window == POOL


def test_sliding_windows_lie_on_both_sides_of_the_boundary() -> None:
    rig = make_window_rig()
    for owner in ("t:a", "t:b"):
        rig.insert(PROMPT + [1] * 16, owner)
        check_windows(rig)
    assert [rig.hit(PROMPT + [1] * 16, owner) for owner in ("t:a", "t:c")] == [40, 24]
    assert all(node.component_data[ComponentType.SWA].value is not None for node in walk(rig.core))


def test_a_window_that_splits_the_private_run_keeps_its_hashes_private() -> None:
    rig = make_window_rig()
    rig.core.enable_storage = True
    for owner in ("t:a", "t:b"):
        rig.insert(PROMPT + [1] * 3 * WINDOW, owner)
    private = [node for node in walk(rig.core) if node.owner != PUBLIC]
    hashes = [page for node in private for page in node.hash_value]
    assert len(private) > 2, "no window split a private run"
    assert len(set(hashes)) == len(hashes)


@pytest.mark.parametrize("seed", range(3))
def test_windows_survive_random_use_by_several_owners(seed: int) -> None:
    rig, random = make_window_rig(), Random(seed)
    for _ in range(400):
        text = PROMPT * (random.random() < 0.7)
        text = text + [
            token for token in random.choices([1, 2], k=random.randint(0, 5)) for _ in "ab"
        ]
        make_room(rig, len(text))
        rig.insert(text, random.choice(["t:a", "t:b", "t:c"]))
        check_windows(rig)
        if random.random() < 0.2:
            rig.cache.evict(EvictParams(num_tokens=random.randint(1, 32)))
        if random.random() < 0.2:
            rig.cache.evict(EvictParams(swa_num_tokens=random.randint(1, 32)))
        check_windows(rig)

"""SGLang's own features on our tree: EAGLE's bigram keys, windows and Mamba states beside full KV.

No model runs here: windows and states are real slots of real pools, without numbers in them, and
SGLang's own check says whether one was lost.
"""

from random import Random

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_ext.radix.integrity import check_integrity, walk
from sglang_ext.types import PUBLIC, Tier
from tests.radix.caches import make_rig
from tests.radix.hybrid import WindowRig, state_rig, window_rig

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


def make_window_rig(page_size: int = 1) -> WindowRig:
    return window_rig(POOL, WINDOW, page_size, [PROMPT])


@pytest.mark.parametrize("page_size", [1, 4])
def test_sliding_windows_lie_on_both_sides_of_the_boundary(page_size: int) -> None:
    rig = make_window_rig(page_size)
    for owner in ("t:a", "t:b"):
        rig.insert(PROMPT + [1] * 16, owner)
        rig.check()
    assert [rig.hit(PROMPT + [1] * 16, owner) for owner in ("t:a", "t:c")] == [40, 24]
    assert all(node.component_data[ComponentType.SWA].value is not None for node in walk(rig.core))


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_window_that_splits_the_private_run_keeps_its_hashes_private(page_size: int) -> None:
    rig = make_window_rig(page_size)
    rig.core.enable_storage = True
    for owner in ("t:a", "t:b"):
        rig.insert(PROMPT + [1] * 3 * WINDOW, owner)
    private = [node for node in walk(rig.core) if node.owner != PUBLIC]
    hashes = [page for node in private for page in node.hash_value]
    assert len(private) > 2, "no window split a private run"
    assert len(set(hashes)) == len(hashes)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("seed", range(2))
def test_windows_survive_random_use_by_several_owners(seed: int, page_size: int) -> None:
    rig, random = make_window_rig(page_size), Random(seed)
    for _ in range(300):
        text = PROMPT * (random.random() < 0.7)
        text = text + [
            token
            for token in random.choices([1, 2], k=random.randint(0, 5))
            for _ in range(2 * page_size)
        ]
        rig.insert(text, random.choice(["t:a", "t:b", "t:c"]))
        rig.check()
        if random.random() < 0.2:
            rig.cache.evict(EvictParams(num_tokens=random.randint(1, 32)))
        if random.random() < 0.2:
            rig.cache.evict(EvictParams(swa_num_tokens=random.randint(1, 32)))
        rig.check()


def test_a_state_is_of_its_owner_and_so_is_what_it_makes_of_use() -> None:
    """Full KV without a state at its end is of no use: a shared prompt needs one of its own."""
    text = PROMPT + [1] * 8
    with state_rig(POOL, 16, [PROMPT]) as rig:
        for owner in ("t:a", "t:b"):
            rig.insert_state(text, owner)
            rig.check()
        assert [rig.hit(text, owner) for owner in ("t:a", "t:b", "t:c")] == [32, 32, 0]
        assert rig.core.ledger.usage(PUBLIC, Tier.HBM).tokens == 24
        states = {
            node.owner: node.component_data[ComponentType.MAMBA].value for node in walk(rig.core)
        }
        assert states[PUBLIC] is None
        assert states["t:a"] != states["t:b"]
        rig.insert_state(PROMPT, "t:d")
        rig.check()
        assert [rig.hit(text, owner) for owner in ("t:a", "t:c")] == [32, 24]


@pytest.mark.parametrize("seed", range(3))
def test_states_survive_random_use_by_several_owners(seed: int) -> None:
    """What one owner finds ends at a state that it, or the shared prompt, has."""
    random, ends = Random(seed), dict[str, set[tuple[int, ...]]]()
    owners = ["t:a", "t:b", "t:c"]
    with state_rig(96, 12, [PROMPT]) as rig:
        for _ in range(300):
            owner, text = random.choice(owners), PROMPT * (random.random() < 0.7)
            text = text + random.choices([1, 2], k=random.randint(1, 8))
            if random.random() < 0.1:
                text = PROMPT
            found = tuple(text[: rig.hit(text, owner)])
            shared = len(found) <= len(PROMPT) and found == tuple(PROMPT[: len(found)])
            assert not found or shared or found in ends.get(owner, ())
            rig.insert_state(text, owner)
            ends.setdefault(owner, set()).add(tuple(text))
            rig.check()
            if random.random() < 0.2:
                rig.cache.evict(EvictParams(num_tokens=random.randint(1, 32)))
            if random.random() < 0.2:
                rig.cache.evict(EvictParams(num_tokens=0, mamba_num=random.randint(1, 4)))
            rig.check()

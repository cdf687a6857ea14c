"""Page hashes of the lower tiers: alike for the public run, different for every owner behind it."""

from typing import Any

from sglang.srt.mem_cache.utils import get_hash_str

from sglang_ext.radix.hashes import boundary_seed
from sglang_ext.radix.integrity import walk
from tests.radix.caches import Rig, make_rig, namespace

PROMPT, TAIL = [7] * 32, [1] * 48


def make_hashing_rig() -> Rig:
    rig = make_rig(1024, 16, [PROMPT])
    rig.core.enable_storage = True
    return rig


def hashes(rig: Rig, owner: str, salt: str | None = None) -> list[str]:
    """Return the hashes from the root to the end of a cached text."""
    node: Any = rig.core.node_by_id(rig.match(PROMPT + TAIL, owner, salt).last_device_node)
    found: list[str] = []
    while node is not rig.core.root_node:
        found = node.hash_value + found
        node = node.parent
    return found


def test_public_pages_hash_alike_and_private_ones_do_not() -> None:
    rig = make_hashing_rig()
    chains = []
    for owner, salt in (("t:a", None), ("t:b", None), ("t:a", "salt")):
        rig.insert(PROMPT + TAIL, owner, salt)
        chains.append(hashes(rig, owner, salt))
    assert all(len(chain) == 5 for chain in chains)
    assert len({tuple(chain[:2]) for chain in chains}) == 1
    assert len({page for chain in chains for page in chain[2:]}) == 9


def test_the_public_run_hashes_as_without_a_namespace() -> None:
    rig = make_hashing_rig()
    rig.insert(PROMPT + TAIL, "t:a")
    public = hashes(rig, "t:a")[:2]
    assert public == get_hash_str(PROMPT, None, page_size=16)
    seed = boundary_seed(public[-1], namespace("t:a"), None)
    assert hashes(rig, "t:a")[2:] == get_hash_str(TAIL, seed, page_size=16)


def test_a_chain_does_not_depend_on_how_the_text_arrived() -> None:
    whole, pieces = make_hashing_rig(), make_hashing_rig()
    whole.insert(PROMPT + TAIL, "t:a")
    for end in (16, 32, 48, 64, 80):
        pieces.insert((PROMPT + TAIL)[:end], "t:a")
    assert hashes(whole, "t:a") == hashes(pieces, "t:a")


def test_hashes_filled_in_later_are_those_of_an_insert() -> None:
    rig, late = make_hashing_rig(), make_rig(1024, 16, [PROMPT])
    for owner in ("t:a", "t:b"):
        rig.insert(PROMPT + TAIL, owner)
        late.insert(PROMPT + TAIL, owner)
    assert late.core.backfill_missing_hash_values() == len(list(walk(late.core)))
    for owner in ("t:a", "t:b"):
        assert hashes(late, owner) == hashes(rig, owner)
    assert late.core.backfill_missing_hash_values() == 0

"""Each check of the tree sees the damage that it is there for."""

from collections.abc import Callable
from typing import Any

import pytest

from sglang_ext.radix.integrity import IntegrityError, check_integrity, walk
from sglang_ext.types import PUBLIC, Owner, Tier
from tests.radix.caches import Rig, make_rig

PROMPT = [7] * 4


def make_tree() -> Rig:
    rig = make_rig(256, 4, [PROMPT])
    rig.insert(PROMPT + [1] * 8, "t:a")
    rig.insert(PROMPT + [1] * 4 + [2] * 4, "t:a")
    rig.insert(PROMPT + [1] * 8, "t:b")
    return rig


def leaf_of(rig: Rig, owner: str) -> Any:
    return next(node for node in walk(rig.core) if node.owner == owner and not node.children)


def inner_of(rig: Rig, owner: str) -> Any:
    return next(node for node in walk(rig.core) if node.owner == owner and node.children)


def lose_parent(rig: Rig) -> None:
    leaf_of(rig, "t:a").parent = rig.core.root_node


def cut_a_page(rig: Rig) -> None:
    node = leaf_of(rig, "t:a")
    full = node.component_data[0]
    full.value = full.value[:3]


def steal(rig: Rig) -> None:
    node = leaf_of(rig, "t:a")
    node.key.extra_key = leaf_of(rig, "t:b").key.extra_key
    node.parent.children = {node.key.child_key(4): node}


def publish(rig: Rig) -> None:
    leaf_of(rig, "t:a").key.owner = PUBLIC


def lock_without_parent(rig: Rig) -> None:
    leaf_of(rig, "t:a").component_data[0].lock_ref = 1


def forget_in_ledger(rig: Rig) -> None:
    rig.core.ledger.book(Owner("t:a"), Tier.HBM, -4, 0)


def invent_in_ledger(rig: Rig) -> None:
    rig.core.ledger.book(Owner("t:z"), Tier.CPU, 4, 0)


def promise_more(rig: Rig) -> None:
    rig.core.component_evictable_size_[0] += 4


def drop_from_order(rig: Rig) -> None:
    rig.core.evictable_device_leaves.discard(leaf_of(rig, "t:a"))


def touch_without_filing(rig: Rig) -> None:
    leaf_of(rig, "t:a").last_access_time += 1


def offer_an_inner_node(rig: Rig) -> None:
    rig.core.evictable_device_leaves.add(inner_of(rig, "t:a"))


def leave_in_arena(rig: Rig) -> None:
    rig.core._node_arena[10**9] = leaf_of(rig, "t:a")


def miscount_children(rig: Rig) -> None:
    inner_of(rig, "t:a").device_children += 1


def miscount_copies(rig: Rig) -> None:
    inner_of(rig, "t:a").host_children += 1


def free_a_parent(rig: Rig) -> None:
    inner_of(rig, "t:a").component_data[0].value = None


def test_an_intact_tree_passes_as_cache_and_as_core() -> None:
    rig = make_tree()
    check_integrity(rig.cache)
    check_integrity(rig.core)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lose_parent, "is not the child of its parent"),
        (cut_a_page, "3 device slots for 4 tokens"),
        (steal, "lies below one of"),
        (publish, "has its boundary at"),
        (lock_without_parent, "has 1 locks, its parent 0"),
        (forget_in_ledger, "ledger and recount"),
        (invent_in_ledger, "'t:z'"),
        (promise_more, "evictable size is"),
        (drop_from_order, "missing"),
        (touch_without_filing, "device order files node"),
        (offer_an_inner_node, "extra"),
        (leave_in_arena, "registered"),
        (miscount_children, "children on the device"),
        (miscount_copies, "children with a host copy"),
        (free_a_parent, "is held by no tier"),
    ],
)
def test_damage_is_named(damage: Callable[[Rig], None], said: str) -> None:
    rig = make_tree()
    damage(rig)
    with pytest.raises(IntegrityError, match=said):
        check_integrity(rig.cache)

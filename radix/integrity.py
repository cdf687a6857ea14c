"""Checks that a tree and everything counted beside it agree; cheap enough for every test step."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from sglang.srt.mem_cache.unified_cache.component_type import BASE_COMPONENT_TYPE
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

from sglang_ext.radix.node import TenantTreeNode
from sglang_ext.radix.order import LeafOrder, LeastRecent
from sglang_ext.types import PUBLIC, Owner, Tier

__all__ = ["IntegrityError", "check_integrity", "walk"]

_FULL = BASE_COMPONENT_TYPE
_WORST = 20


class IntegrityError(AssertionError):
    """The tree contradicts itself; the message names each contradiction with its numbers."""


def check_integrity(tree: Any) -> None:
    """Raise IntegrityError unless everything about ``tree`` (a cache or its core) agrees.

    Checks parents and children, keys and pages, one owner behind the boundary, locks, tiers, sizes,
    leaf orders, and the ledger against a recount. Changes nothing. O(nodes log nodes).
    """
    core = getattr(tree, "tree_core", tree)
    nodes = list(walk(core))
    problems = [problem for node in nodes for problem in _node_problems(core, node)]
    problems += _arena_problems(core, nodes)
    problems += _size_problems(core, nodes)
    problems += _ledger_problems(core, nodes)
    for name, leaves, is_leaf in (
        ("device", core.evictable_device_leaves, UnifiedTreeCore._is_device_leaf),
        ("host", core.evictable_host_leaves, _may_leave_host),
    ):
        problems += _order_problems(name, leaves, {node for node in nodes if is_leaf(core, node)})
    if problems:
        shown = "\n  ".join(problems[:_WORST])
        raise IntegrityError(f"{len(problems)} problems in {len(nodes)} nodes:\n  {shown}")


def walk(core: Any) -> Iterator[TenantTreeNode]:
    """Yield every node but the root, parents before children, in insertion order."""
    stack = list(reversed(core.root_node.children.values()))
    while stack:
        node = stack.pop()
        yield node
        stack.extend(reversed(node.children.values()))


def _node_problems(core: Any, node: TenantTreeNode) -> Iterator[str]:
    full, parent, size = node.component_data[_FULL], node.parent, len(node.key)
    name = f"node {node.id}"
    if parent is None or parent.children.get(node.key.child_key(core.page_size)) is not node:
        yield f"{name} is not the child of its parent under its own key"
        return
    if size <= 0 or size % core.page_size:
        yield f"{name} holds {size} tokens, not whole pages of {core.page_size}"
    for tier, value in (("device", full.value), ("host", full.host_value)):
        if value is not None and len(value) != size:
            yield f"{name} has {len(value)} {tier} slots for {size} tokens"
    if not node.tiers:
        yield f"{name} is held by no tier"
    if node.booked != node.holding():
        yield f"{name} is booked as {node.booked} but holds {node.holding()}"
    on_device = sum(_full(child).value is not None for child in node.children.values())
    on_host = sum(_full(child).host_value is not None for child in node.children.values())
    if node.device_children != on_device:
        yield f"{name} counts {node.device_children} children on the device of {on_device}"
    if node.host_children != on_host:
        yield f"{name} counts {node.host_children} children with a host copy of {on_host}"
    yield from _owner_problems(name, node, core.root_node)
    yield from _lock_problems(name, node, core.root_node)


def _full(node: Any) -> Any:
    return node.component_data[_FULL]


def _may_leave_host(core: Any, node: TenantTreeNode) -> bool:
    """Tell whether SGLang lets a last copy go, or a copy beside HBM is the end of its path."""
    if UnifiedTreeCore._is_host_leaf(core, node):
        return True
    below = any(_full(child).host_value is not None for child in node.children.values())
    spare = core.enable_storage and len(core.components) == 1 and not below
    return bool(spare and core._can_reclaim_full_host_duplicate(node))


def _owner_problems(name: str, node: TenantTreeNode, root: Any) -> Iterator[str]:
    key = node.key
    if (key.public > 0) != (node.owner == PUBLIC) or 0 < key.public < len(key):
        yield f"{name} of {node.owner!r} has its boundary at {key.public} of {len(key)}"
    if node.owner == PUBLIC and (key.extra_key, key.cache_salt) != (None, None):
        yield f"{name} is public but carries the namespace {key.extra_key!r}, {key.cache_salt!r}"
    above = node.parent
    if above is root or above.owner == PUBLIC:
        return
    if (above.key.extra_key, above.key.cache_salt) != (key.extra_key, key.cache_salt):
        yield f"{name} of {key.extra_key!r} lies below one of {above.key.extra_key!r}"


def _lock_problems(name: str, node: TenantTreeNode, root: Any) -> Iterator[str]:
    full, above = node.component_data[_FULL], node.parent.component_data[_FULL]
    if full.lock_ref < 0 or full.host_lock_ref < 0:
        yield f"{name} has {full.lock_ref} device and {full.host_lock_ref} host locks"
    if full.value is None or node.parent is root:
        return
    if above.value is None:
        yield f"{name} is on the device but its parent {node.parent.id} is not"
    if full.lock_ref > above.lock_ref:
        yield f"{name} has {full.lock_ref} locks, its parent {above.lock_ref}"


def _arena_problems(core: Any, nodes: list[TenantTreeNode]) -> Iterator[str]:
    found = {node.id: node for node in [core.root_node, *nodes]}
    if found != core._node_arena:
        strays = sorted(found.keys() ^ core._node_arena.keys())[:_WORST]
        yield f"{len(found)} nodes but {len(core._node_arena)} registered; differing: {strays}"


def _size_problems(core: Any, nodes: list[TenantTreeNode]) -> Iterator[str]:
    counted: Counter[str] = Counter()
    for node in nodes:
        tokens, locked, _, _ = node.holding()
        counted["protected" if locked else "evictable"] += tokens
    for word, said in (("evictable", core.evictable_size()), ("protected", core.protected_size())):
        if said != counted[word]:
            yield f"{word} size is {said}, the nodes add up to {counted[word]}"


def _ledger_problems(core: Any, nodes: list[TenantTreeNode]) -> Iterator[str]:
    counted: dict[tuple[Owner, Tier], list[int]] = {}
    for node in nodes:
        held = node.holding()
        for tier, (tokens, locked) in ((Tier.HBM, held[:2]), (Tier.CPU, held[2:])):
            if tokens:
                counted.setdefault((node.owner, tier), [0, 0])[locked] += tokens
    said = {
        (owner, tier): [usage.evictable, usage.protected]
        for owner, tier, usage in core.ledger
        if usage.evictable or usage.protected
    }
    if said != counted:
        differing = {key: (said.get(key), counted.get(key)) for key in said.keys() | counted.keys()}
        wrong = {key: pair for key, pair in differing.items() if pair[0] != pair[1]}
        yield f"ledger and recount of [evictable, protected] differ: {wrong}"


def _order_problems(name: str, leaves: LeafOrder, expected: set[TenantTreeNode]) -> Iterator[str]:
    if leaves != expected:
        extra, missing = leaves - expected, expected - leaves
        yield f"{name} leaves: extra {_ids(extra)}, missing {_ids(missing)}"
    filed = [(owner, *entry) for owner, order in leaves.by_owner().items() for entry in order]
    if len(filed) != len(leaves):
        yield f"{name} order files {len(filed)} entries for {len(leaves)} leaves"
    for owner, stamp, leaf in filed:
        if leaf not in leaves or (owner, stamp) != (leaf.owner, leaf.last_access_time):
            yield f"{name} order files node {leaf.id} of {leaf.owner!r} under {owner!r} {stamp}"
    for owner, order in leaves.by_owner().items():
        for part in (list(order.recent.values()), list(order.late)):
            if part != sorted(part):
                yield f"{name} order of {owner!r} is not sorted: {part[:_WORST]}"
    oldest = leaves.oldest()
    # Reserves may keep every leaf from those who ask.
    if oldest is None and not isinstance(leaves.strategy, LeastRecent):
        return
    if oldest not in leaves and (oldest is not None or leaves):
        yield f"{name} order offers {oldest} of {len(leaves)} leaves"


def _ids(nodes: set[TenantTreeNode]) -> list[int]:
    return sorted(node.id for node in nodes)[:_WORST]

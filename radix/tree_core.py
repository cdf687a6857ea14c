"""The tree: SGLang's Python core with owners, a public boundary, a ledger and orders of victims."""

from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.unified_cache.component_type import BASE_COMPONENT_TYPE, ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore
from sglang.srt.mem_cache.utils import compute_node_hash_values

from sglang_ext.radix.clock import SharedClock
from sglang_ext.radix.hashes import node_hashes, turns_private
from sglang_ext.radix.key import TenantKey, own
from sglang_ext.radix.ledger import Ledger
from sglang_ext.radix.node import NOTHING, Holding, TenantTreeNode
from sglang_ext.radix.order import LeafOrder, LeastRecent
from sglang_ext.radix.public import PublicPrefixes
from sglang_ext.types import Tier

__all__ = ["TenantTreeCore"]

_FULL = BASE_COMPONENT_TYPE
_NOBODY: tuple[None, float, int] = (None, 0.0, 0)


class TenantTreeCore(UnifiedTreeCore):
    """A path is zero or more public runs, then runs of exactly one owner.

    Every key becomes a TenantKey on its way in, so no walk can see another owner's nodes.
    """

    root_node: Any

    def __init__(self, params: Any, components: Any) -> None:
        self.public = PublicPrefixes((), params.page_size)
        self.clock = SharedClock()
        self.ledger = Ledger()
        self._touched: tuple[Any, float, int] = _NOBODY
        super().__init__(params, components)

    def reset(self) -> None:
        super().reset()
        self.ledger.clear()
        self.evictable_device_leaves = LeafOrder(LeastRecent())
        self.evictable_host_leaves = LeafOrder(LeastRecent())

    # ---- keys

    def own(self, key: Any) -> TenantKey:
        """Return a key that starts at the root with its owner and public boundary."""
        return own(key, self.public, self.is_eagle)

    def _match_prefix_helper(self, key: Any, params: MatchPrefixParams) -> MatchResult:
        self._touched = _NOBODY
        return super()._match_prefix_helper(self.own(key), params)

    def match_full_device_prefix(self, key: Any) -> tuple[int, int, int]:
        return super().match_full_device_prefix(self.own(key))

    def begin_insert(self, params: InsertParams) -> Any:
        params.key = self.own(params.key)
        return super().begin_insert(params)

    def _insert_commit_step(self, state: Any) -> None:
        """Add the tail in one node, or in two when it begins public and goes on private."""
        matched, public = state.total_prefix_length, state.key.public
        if 0 < public < len(state.key):
            self._insert_public_run(state, public)
        super()._insert_commit_step(state)
        state.result.prefix_len = matched
        # A component may have stamped the node once more.
        self._file(state.target_node)

    def _insert_public_run(self, state: Any, public: int) -> None:
        start, end = state.total_prefix_length, state.total_prefix_length + public
        state.result.record_adopted_range(_FULL, start, end)
        state.node = self._add_new_node(
            state.node,
            state.key[:public],
            state.value[:public],
            priority=state.priority,
            session_id=state.params.session_id,
            rotation_base=state.params.rotation_base,
        )
        state.result.prefix_len = start
        for component in self.components:
            # Mamba's state belongs to the end of the whole text, a window's to each of its parts.
            if component.component_type is not ComponentType.MAMBA:
                component.commit_insert_component_data(
                    node=state.node,
                    is_new_leaf=True,
                    params=state.params,
                    result=state.result,
                    cache_actions=state.pending_actions,
                )
        state.key, state.value = state.key[public:], state.value[public:]
        state.total_prefix_length = end

    # ---- nodes

    def _new_node(self, priority: int = 0) -> TenantTreeNode:
        node = TenantTreeNode(self.component_types, priority, self.clock.now_ms)
        self._register_node(node)
        return node

    def _add_new_node(self, parent: Any, key: TenantKey, value: Any, **kwargs: Any) -> Any:
        node = super()._add_new_node(parent, key, value, **kwargs)
        if node.hash_value is not None and turns_private(node):
            node.hash_value = node_hashes(node, self.page_size)
        return node

    def backfill_missing_hash_values(self) -> int:
        """Hash what was built while storage was off, parents first, seeding boundaries again."""
        filled = 0
        stack = list(self.root_node.children.values())
        while stack:
            node = stack.pop()
            if node.hash_value is None:
                private = turns_private(node)
                hashes = node_hashes if private else compute_node_hash_values
                node.hash_value = hashes(node, self.page_size)
                filled += 1
            stack.extend(node.children.values())
        return filled

    def _split_node(self, key: Any, child: Any, split_len: int) -> tuple[Any, Any]:
        """Split as SGLang does, but let the untouched suffix keep its age."""
        touched, stamp, access_ms = self._touched
        if touched is not child:
            stamp, access_ms = child.last_access_time, child.access_ms
        node, action = super()._split_node(key, child, split_len)
        node.access_ms, node.hits = child.access_ms, child.hits
        child.last_access_time, child.access_ms = stamp, access_ms
        self._file(child)
        return node, action

    # ---- recency

    def _match_post_processor(self, *args: Any, **kwargs: Any) -> MatchResult:
        result = super()._match_post_processor(*args, **kwargs)
        _, _, deepest, deepest_on_device = args[:4]
        now, node = self.clock.now_ms, deepest
        while node is not None:
            node.access_ms = now
            node = node.parent
        # Of the nodes on one path, only these two can be leaves of a tier.
        self._file(deepest)
        self._file(deepest_on_device)
        return result

    def _touch_node(self, node: Any) -> None:
        self._touched = (node, node.last_access_time, node.access_ms)
        super()._touch_node(node)
        node.access_ms = self.clock.now_ms
        self._file(node)

    def _file(self, node: Any) -> None:
        """File a leaf again under its present stamp; nothing for other nodes."""
        if node in self.evictable_device_leaves:
            self.evictable_device_leaves.add(node)
        elif node in self.evictable_host_leaves:
            self.evictable_host_leaves.add(node)

    def _finish_insert_walk_node(self, state: Any, node: Any, prefix_len: int) -> None:
        if state.total_prefix_length + prefix_len > state.params.inserted_len:
            node.hits += 1
        super()._finish_insert_walk_node(state, node, prefix_len)

    # ---- ledger

    def book(self, node: TenantTreeNode) -> None:
        """Bring the ledger up to date with one node. Idempotent, O(1)."""
        self._settle(node, node.holding())

    def _settle(self, node: TenantTreeNode, now: Holding) -> None:
        was, node.booked = node.booked, now
        if now == was:
            return
        for tier, before, locked_before, after, locked in (
            (Tier.HBM, *was[:2], *now[:2]),
            (Tier.CPU, *was[2:], *now[2:]),
        ):
            free = after * (not locked) - before * (not locked_before)
            kept = after * locked - before * locked_before
            if free or kept:
                self.ledger.book(node.owner, tier, free, kept)

    def _update_evictable_leaf_sets(self, node: TenantTreeNode) -> None:
        super()._update_evictable_leaf_sets(node)
        if node is not self.root_node:
            self.book(node)

    def _unregister_node(self, node: TenantTreeNode) -> None:
        super()._unregister_node(node)
        self._settle(node, NOTHING)

"""The tree: SGLang's Python core with owners, a public boundary, a ledger and orders of victims."""

from array import array
from typing import Any, NamedTuple

from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import BASE_COMPONENT_TYPE, ComponentType
from sglang.srt.mem_cache.unified_cache.components.base import get_and_increase_time_counter
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import (
    EvictDeviceNextNodeResult,
)
from sglang.srt.mem_cache.utils import compute_node_hash_values

from sglang_ext.radix.clock import SharedClock
from sglang_ext.radix.events import OwnedEvents
from sglang_ext.radix.hashes import boundary_seed, node_hashes, turns_private
from sglang_ext.radix.host_copies import is_spare_copy
from sglang_ext.radix.key import TenantKey, own
from sglang_ext.radix.ledger import Ledger
from sglang_ext.radix.node import FULL, NOTHING, Holding, TenantTreeNode
from sglang_ext.radix.order import LeafOrder
from sglang_ext.radix.public import PublicPrefixes
from sglang_ext.radix.victims import Victims
from sglang_ext.types import PUBLIC, Owner, Tier

__all__ = ["FetchPlan", "TenantTreeCore"]

_FULL = BASE_COMPONENT_TYPE
_HBM, _CPU = Tier.HBM, Tier.CPU  # an enum's members are slow to read
_NOBODY: tuple[None, float, int] = (None, 0.0, 0)


class FetchPlan(NamedTuple):
    """A request to the lower tiers: how many units, in which namespace, chained to which hash.

    ``owner`` is whose pages those are.
    """

    units: int
    extra_key: str | None
    cache_salt: str | None
    last_hash: str | None
    owner: Owner


class TenantTreeCore(UnifiedTreeCore):
    """A path is zero or more public runs, then runs of exactly one owner.

    Every key becomes a TenantKey on its way in, so no walk can see another owner's nodes.
    """

    root_node: Any
    kv_events: Any

    def __init__(self, params: Any, components: Any) -> None:
        self.public = PublicPrefixes((), params.page_size)
        self.clock = SharedClock()
        self.ledger = Ledger()
        self.victims = Victims(self)
        self._touched: tuple[Any, float, int] = _NOBODY
        super().__init__(params, components)
        self.kv_events = OwnedEvents(self.kv_events)

    def reset(self) -> None:
        super().reset()
        self.victims.flushed()
        self.ledger.clear()
        self.evictable_device_leaves = LeafOrder(self.victims.strategy(Tier.HBM))
        self.evictable_host_leaves = LeafOrder(self.victims.strategy(Tier.CPU))

    # ---- keys

    def own(self, key: Any) -> TenantKey:
        """Return a key that starts at the root with its owner and public boundary."""
        return own(key, self.public, self.is_eagle)

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        key = own(params.key, self.public, self.is_eagle, self.page_size)
        if not key.size:
            return self._empty_match_result
        self._touched = _NOBODY
        result = self._match_prefix_helper(key, params)
        self._note_use(self._node_arena[result.best_match_node])
        return result

    def match_full_device_prefix(self, key: Any) -> tuple[int, int, int]:
        return super().match_full_device_prefix(self.own(key))

    def own_below(self, node_id: int, key: Any) -> TenantKey:
        """Return a key that continues a node's text with its owner and public boundary.

        O(tokens above the node), copied in C: the boundary depends on the whole text.
        """
        runs, node = [key.raw_token_ids()], self.node_by_id(node_id)
        while node is not self.root_node:
            runs.append(node.key.token_ids[: len(node.key)])
            node = node.parent
        start = sum(map(len, runs[1:]))
        text = array("q")
        for run in reversed(runs):
            text += run
        whole = RadixKey(text, key.extra_key, key.is_bigram, cache_salt=key.cache_salt)
        return self.own(whole)[start:]

    def fetch_plan(self, node_id: int, key: Any) -> FetchPlan:
        """Return what to ask the lower tiers for below a node: one side of the boundary only.

        Public pages lie there without a namespace; private ones hang on the owner, so their hash
        chain starts again behind a public run.
        """
        key = self.own_below(node_id, key)
        if key.public > 0:
            return FetchPlan(key.public, None, None, self.get_last_hash_value(node_id), PUBLIC)
        last_hash = self.get_last_hash_value(node_id)
        if last_hash is not None and self.node_by_id(node_id).owner == PUBLIC:
            last_hash = boundary_seed(last_hash, key.extra_key, key.cache_salt)
        return FetchPlan(len(key), key.extra_key, key.cache_salt, last_hash, key.owner)

    def insert_host(self, node_id: int, key: Any, host_value: Any, hash_value: Any) -> Any:
        owned = self.own_below(node_id, key)
        assert not 0 < owned.public < len(owned), "a fetched span crosses the public boundary"
        return super().insert_host(node_id, owned, host_value, hash_value)

    def begin_insert(self, params: InsertParams) -> Any:
        params.key = own(params.key, self.public, self.is_eagle, self.page_size)
        return UnifiedTreeCore.begin_insert(self, params)

    def _insert_commit_step(self, state: Any) -> None:
        """Add the tail in one node, or in two when it begins public and goes on private."""
        public = state.key.public
        if 0 < public < state.key.size:
            matched = state.total_prefix_length
            self._insert_public_run(state, public)
            UnifiedTreeCore._insert_commit_step(self, state)
            state.result.prefix_len = matched
        else:
            UnifiedTreeCore._insert_commit_step(self, state)
        if len(self.components) > 1:
            # Another component may have stamped the node once more.
            self._update_evictable_leaf_sets(state.target_node)

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

    def _add_new_node(
        self,
        parent: Any,
        key: TenantKey,
        value: Any,
        priority: int = 0,
        session_id: Any = None,
        rotation_base: Any = None,
    ) -> Any:
        node = UnifiedTreeCore._add_new_node(
            self, parent, key, value, priority, session_id, rotation_base
        )
        if node.hash_value is not None and turns_private(node):
            # At once: a component may split the node before the insert is over.
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
            self._update_host_leaf(node)
            stack.extend(node.children.values())
        return filled

    def _split_node(self, key: Any, child: Any, split_len: int) -> tuple[Any, Any]:
        """Split as SGLang does, but let the untouched suffix keep its age."""
        touched, stamp, access_ms = self._touched
        if touched is not child:
            stamp, access_ms = child.last_access_time, child.access_ms
        on_device, on_host = child.booked[0] > 0, child.booked[2] > 0
        child.parent.device_children -= on_device
        child.parent.host_children -= on_host
        node, action = super()._split_node(key, child, split_len)
        node.access_ms, node.hits = child.access_ms, child.hits
        node.device_children, node.host_children = int(on_device), int(on_host)
        child.last_access_time, child.access_ms = stamp, access_ms
        self._update_evictable_leaf_sets(node)
        self._update_evictable_leaf_sets(child)
        return node, action

    def cut(self, leaf: Any, keep: int, cache_actions: list[Any]) -> None:
        """Leave the last tokens of a leaf in it, the first ``keep`` in a parent of the same age."""
        self._touched = _NOBODY
        stamp = leaf.last_access_time
        node, action = self._split_node(leaf.key, leaf, keep)
        node.last_access_time = stamp
        if action is not None:
            cache_actions.append(action)

    # ---- recency

    def _note_use(self, deepest: Any) -> None:
        """Stamp a matched path on the shared clock and file the leaves on it again. O(path)."""
        now, node = self.clock.now_ms, deepest
        in_hbm, in_cpu = self.evictable_device_leaves, self.evictable_host_leaves
        while node is not None:
            node.access_ms = now
            if node in in_hbm:
                in_hbm.touch(node)
            if node in in_cpu:
                in_cpu.touch(node)
            node = node.parent

    def _touch_node(self, node: Any) -> None:
        if node is self.root_node:
            node.last_access_time = get_and_increase_time_counter()
            return
        self._touched = (node, node.last_access_time, node.access_ms)
        super()._touch_node(node)
        node.access_ms = self.clock.now_ms
        if node in self.evictable_device_leaves:
            self.evictable_device_leaves.touch(node)
        if node in self.evictable_host_leaves:
            self.evictable_host_leaves.touch(node)

    def _finish_insert_walk_node(self, state: Any, node: Any, prefix_len: int) -> None:
        if state.total_prefix_length + prefix_len > state.params.inserted_len:
            node.hits += 1
        super()._finish_insert_walk_node(state, node, prefix_len)

    # ---- victims

    def evict_device_next_node(self, component_type: Any, tracker: dict[Any, int]) -> Any:
        """Do what SGLang does, without its accounts of a step that only names a leaf.

        Full attention's step frees and counts nothing; at most it cuts a leaf. So there is no need
        to copy the tracker and to compare it afterwards at each victim.
        """
        if component_type is not _FULL:
            return super().evict_device_next_node(component_type, tracker)
        step = EvictDeviceNextNodeResult()
        step.node_id = self.components_by_type[_FULL].evict_device_next_node(
            tracker, step.device_frees, step.host_frees, step.cache_actions
        )
        step.made_progress = step.node_id is not None or bool(step.cache_actions)
        return step

    # ---- pins

    def pin(self, node_id: int) -> None:
        """Keep a node and its path where they are until ``unpin``. O(path)."""
        self.inc_full_pin(node_id)
        self.node_by_id(node_id).pins += 1

    def unpin(self, node_id: int) -> None:
        """Undo one ``pin`` of the same node. O(path)."""
        node = self.node_by_id(node_id)
        assert node.pins > 0, f"node {node_id} is not pinned"
        node.pins -= 1
        self.dec_full_pin(node_id)

    # ---- ledger and leaves

    def book(self, node: TenantTreeNode) -> None:
        """Bring the ledger up to date with one node. Idempotent, O(1)."""
        now = node.holding()
        if now != node.booked:
            self._settle(node, now)

    def _settle(self, node: TenantTreeNode, now: Holding) -> None:
        (hbm, hbm_locked, cpu, cpu_locked), owner = now, node.key.owner
        had_hbm, had_hbm_locked, had_cpu, had_cpu_locked = node.booked
        node.booked = now
        if hbm != had_hbm or hbm_locked != had_hbm_locked:
            free = hbm * (not hbm_locked) - had_hbm * (not had_hbm_locked)
            self.ledger.book(owner, _HBM, free, hbm - had_hbm - free)
            node.parent.device_children += (hbm > 0) - (had_hbm > 0)
        if cpu != had_cpu or cpu_locked != had_cpu_locked:
            free = cpu * (not cpu_locked) - had_cpu * (not had_cpu_locked)
            self.ledger.book(owner, _CPU, free, cpu - had_cpu - free)
            if (cpu > 0) != (had_cpu > 0):
                node.parent.host_children += (cpu > 0) - (had_cpu > 0)
                self._update_host_leaf(node.parent)

    def _update_evictable_leaf_sets(self, node: TenantTreeNode) -> None:
        """Do what SGLang does, with fewer questions, and book the node: all that changes passes."""
        if node is self.root_node:
            return
        now = node.holding()
        if now != node.booked:
            self._settle(node, now)
        hbm, locked, cpu, _ = now
        leaves = self.evictable_device_leaves
        may_go = hbm and not locked and not node.device_children
        if may_go and (len(self.components) == 1 or self._is_device_leaf(node)):
            leaves.add(node)
        elif node in leaves:
            leaves.discard(node)
        if cpu or node in self.evictable_host_leaves:
            self._update_host_leaf(node)

    def _update_host_leaf(self, node: TenantTreeNode) -> None:
        if node.booked[2] and self._is_host_leaf(node):
            self.evictable_host_leaves.add(node)
        elif node in self.evictable_host_leaves:
            self.evictable_host_leaves.discard(node)

    def mark_write_through_pending(self, node_ids: list[int], ack_id: int) -> list[int]:
        marked: list[int] = super().mark_write_through_pending(node_ids, ack_id)
        for node_id in marked:
            self._update_host_leaf(self.node_by_id(node_id))
        return marked

    def finish_write_through(self, node_ids: list[int], ack_id: int) -> None:
        super().finish_write_through(node_ids, ack_id)
        for node_id in node_ids:
            self._update_host_leaf(self.node_by_id(node_id))

    def _is_device_leaf(self, node: TenantTreeNode) -> bool:
        """Answer as SGLang does, in O(1): it asks every child, we count the children there."""
        full = node.component_data[FULL]
        if full.value is None or full.lock_ref or node.device_children:
            return False
        # Whoever locks another component locks this one too; a window cut short may outlive it.
        if len(self.components) > 1 and any(data.lock_ref for data in node.component_data):
            return False
        return node is not self.root_node

    def _is_host_leaf(self, node: TenantTreeNode) -> bool:
        """Tell whether a copy in host memory may go: the last one as in SGLang, or a spare one."""
        if node.component_data[FULL].value is not None:
            return is_spare_copy(self, node)
        if node.children:
            return False
        return bool(super()._is_host_leaf(node))

    def _unregister_node(self, node: TenantTreeNode) -> None:
        super()._unregister_node(node)
        self._settle(node, NOTHING)

"""Full attention's part of the tree with victims from the leaf order instead of a heap per call."""

from typing import Any

from sglang.srt.mem_cache.unified_cache.component_type import BASE_COMPONENT_TYPE
from sglang.srt.mem_cache.unified_cache.components.full import FullComponent

from sglang_ext.radix.host_copies import free_host_leaf
from sglang_ext.radix.node import FULL
from sglang_ext.radix.victims import Victim
from sglang_ext.types import Tier

__all__ = ["TenantFullComponent"]

_FULL = BASE_COMPONENT_TYPE
_HBM = Tier.HBM  # an enum's members are slow to read


class TenantFullComponent(FullComponent):
    """Evicts the leaf that the order names, one at a time, and books what a lock protects."""

    tree_core: Any
    component_type: Any

    def _evict_device_start(self, request_cnt: int) -> None:
        self._wanted = request_cnt
        self._offered: Victim | None = None
        self._refused: list[Any] = []

    def _evict_device_next_node(
        self, tracker: Any, device_frees: Any, host_frees: Any, cache_actions: Any
    ) -> int | None:
        if self._offered is not None:
            self._settle_offer(self._offered)
        missing = self._wanted - tracker.get(_FULL, 0)
        if missing > 0:
            self._offered = self.tree_core.victims.choose(_HBM, missing, cache_actions)
        return None if self._offered is None else self._offered.node.id

    def _settle_offer(self, offered: Victim) -> None:
        """Count the node that was offered last, or pass it over for this time."""
        self._offered = None
        leaves = self.tree_core.evictable_device_leaves
        if offered.node not in leaves:
            self.tree_core.victims.gone(offered)
            return
        # The controller could not take it: there was no room for its copy below.
        leaves.discard(offered.node)
        self._refused.append(offered.node)

    def _evict_device_end(self) -> None:
        if self._offered is not None:
            self._settle_offer(self._offered)
        for node in self._refused:
            self.tree_core._update_evictable_leaf_sets(node)
        self._refused = []

    def drive_host_eviction(
        self,
        num_tokens: int,
        tracker: Any,
        device_frees: Any,
        host_frees: Any,
        cache_actions: Any,
    ) -> None:
        victims = self.tree_core.victims
        while (missing := num_tokens - tracker[self.component_type]) > 0:
            victim = victims.choose(Tier.CPU, missing, cache_actions)
            if victim is None:
                return
            free_host_leaf(
                self.tree_core, victim.node, tracker, device_frees, host_frees, cache_actions
            )
            victims.gone(victim)

    def reclaimable_value_len(self, node: Any) -> int:
        # As many slots as tokens; a tensor's own length costs a call into torch.
        return node.key.size if node.component_data[FULL].value is not None else 0

    def acquire_component_lock(self, node: Any, result: Any, lock_host: bool = False) -> Any:
        result = super().acquire_component_lock(node, result, lock_host)
        if not lock_host:
            self._book_newly_locked(node)
        return result

    def _book_newly_locked(self, node: Any) -> None:
        """Book the lower end of the path; whoever holds an ancestor holds it with fewer locks."""
        core, kind = self.tree_core, self.component_type
        while node is not core.root_node and node.component_data[kind].lock_ref == 1:
            core.book(node)
            node = node.parent

    def commit_hicache_transfer(self, node: Any, phase: Any, *args: Any, **kwargs: Any) -> None:
        super().commit_hicache_transfer(node, phase, *args, **kwargs)
        self.tree_core.book(node)

    def redistribute_on_node_split(self, new_parent: Any, child: Any) -> None:
        super().redistribute_on_node_split(new_parent, child)
        if child.lifespan is not None:
            self.tree_core.deadlines.split(child, new_parent)

    def discard_deleted_session_leaf(self, node: Any) -> None:
        # SGLang's own sessions are refused; at this moment a node still has parent and hashes.
        if node.sessions is not None:
            self.tree_core.sessions.left(node)
        if node.lifespan is not None:
            self.tree_core.deadlines.left(node)

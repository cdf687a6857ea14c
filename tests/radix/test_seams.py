"""What we build on in SGLang and it does not promise: each name with the parameters we rely on."""

import inspect
from collections.abc import Callable

import pytest
from sglang.srt.mem_cache import registry, utils
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components.full import FullComponent
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore, UnifiedTreeNode
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_ext.patches.versions import check_signature
from sglang_ext.prefix_cache import TenantRadixCache
from sglang_ext.radix.component import TenantFullComponent
from sglang_ext.radix.events import OwnedEvents
from sglang_ext.radix.key import TenantKey
from sglang_ext.radix.node import TenantTreeNode
from sglang_ext.radix.tree_core import TenantTreeCore

FREES = ("tracker", "device_frees", "host_frees", "cache_actions")


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (UnifiedTreeCore.match_prefix, ("self", "params")),
        (UnifiedTreeCore._match_prefix_helper, ("self", "key", "params")),
        (UnifiedTreeCore.match_full_device_prefix, ("self", "key")),
        (UnifiedTreeCore.begin_insert, ("self", "params")),
        (UnifiedTreeCore._insert_commit_step, ("self", "state")),
        (UnifiedTreeCore._finish_insert_walk_node, ("self", "state", "node", "prefix_len")),
        (UnifiedTreeCore._new_node, ("self", "priority")),
        (UnifiedTreeCore._split_node, ("self", "key", "child", "split_len")),
        (UnifiedTreeCore._touch_node, ("self", "node")),
        (UnifiedTreeCore._register_node, ("self", "node")),
        (UnifiedTreeCore._unregister_node, ("self", "node")),
        (UnifiedTreeCore._update_evictable_leaf_sets, ("self", "node")),
        (UnifiedTreeCore._is_device_leaf, ("self", "node")),
        (UnifiedTreeCore._is_host_leaf, ("self", "node")),
        (UnifiedTreeCore.insert_host, ("self", "node_id", "key", "host_value", "hash_value")),
        (UnifiedTreeCore.backfill_missing_hash_values, ("self",)),
        (UnifiedTreeCore.inc_full_pin, ("self", "node_id")),
        (UnifiedTreeCore.dec_full_pin, ("self", "node_id")),
        (UnifiedTreeNode.__init__, ("self", "tree_components", "priority")),
        (FullComponent._evict_device_start, ("self", "request_cnt")),
        (FullComponent._evict_device_next_node, ("self", *FREES)),
        (FullComponent._evict_device_end, ("self",)),
        (FullComponent.drive_host_eviction, ("self", "num_tokens", *FREES)),
        (FullComponent.acquire_component_lock, ("self", "node", "result", "lock_host")),
        (RadixKey.__init__, ("self", "token_ids", "extra_key", "is_bigram", "limit", "cache_salt")),
        (RadixKey.child_key_at, ("self", "offset", "page_size")),
        (RadixKey.match_at, ("self", "other", "offset", "page_size")),
        (RadixKey._check_compatible, ("self", "other")),
        (utils.compute_node_hash_values, ("node", "page_size")),
        (utils.get_hash_str, ("token_ids", "prior_hash", "page_size")),
        (utils.storage_namespace_seed, ("extra_key", "cache_salt")),
        (registry.create_unified_radix_cache, ("ctx", "cache_class")),
    ],
)
def test_a_private_method_still_takes_what_we_override_or_pass(
    function: Callable[..., object], parameters: tuple[str, ...]
) -> None:
    check_signature(function, parameters)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (TenantKey, RadixKey),
        (TenantTreeNode, UnifiedTreeNode),
        (TenantTreeCore, UnifiedTreeCore),
        (TenantFullComponent, FullComponent),
        (OwnedEvents, KVCacheEventRecorder),
        (TenantRadixCache, UnifiedRadixCache),
    ],
)
def test_every_override_takes_what_it_overrides(ours: type, theirs: type) -> None:
    """A renamed method would silently stop being overridden; a new parameter would not arrive."""
    for name, method in vars(ours).items():
        if not inspect.isfunction(method) or name == "__init__" or not hasattr(theirs, name):
            continue
        expected = tuple(inspect.signature(inspect.unwrap(getattr(theirs, name))).parameters)
        if "args" not in inspect.signature(method).parameters:
            check_signature(method, expected)


def test_the_insert_walk_still_carries_the_state_that_we_rewrite() -> None:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import _InsertWalkState

    fields = {"node", "key", "value", "params", "result", "total_prefix_length", "target_node"}
    assert fields <= set(_InsertWalkState.__struct_fields__)


def test_leaf_sets_are_changed_only_by_add_and_discard() -> None:
    """Our order takes the place of a set; any other way to change it would go past the order."""
    source = inspect.getsource(UnifiedTreeCore) + inspect.getsource(FullComponent)
    for name in ("evictable_device_leaves", "evictable_host_leaves"):
        for way in (".remove(", ".pop(", ".clear(", ".update(", " |=", " -="):
            assert f"{name}{way}" not in source

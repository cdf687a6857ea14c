"""A pinned path stays, in HBM and in CPU, until the last pin is taken off."""

import pytest
import torch
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_ext.radix.integrity import check_integrity
from sglang_ext.types import Owner, Tier
from tests.radix.caches import make_rig

TEXT = [1] * 8


def test_a_pinned_path_is_never_evicted() -> None:
    rig = make_rig(64, 4)
    rig.insert(TEXT, "t:a")
    node = rig.match(TEXT, "t:a").last_device_node
    rig.core.pin(node)
    rig.core.pin(node)
    assert rig.evict(64) == 0
    assert rig.core.ledger.usage(Owner("t:a"), Tier.HBM).protected == 8
    rig.core.unpin(node)
    assert rig.evict(64) == 0
    rig.core.unpin(node)
    check_integrity(rig.cache)
    assert rig.evict(64) == 8


def test_a_split_leaves_the_pin_on_the_end_of_the_path() -> None:
    rig = make_rig(64, 4)
    rig.insert(TEXT, "t:a")
    node = rig.match(TEXT, "t:a").last_device_node
    rig.core.pin(node)
    assert rig.hit(TEXT[:4], "t:a") == 4
    check_integrity(rig.cache)
    assert rig.evict(64) == 0
    rig.core.unpin(node)
    check_integrity(rig.cache)
    assert rig.evict(64) == 8


def test_a_pinned_host_copy_is_not_dropped() -> None:
    rig = make_rig(64, 4)
    rig.core.set_hicache_enabled()
    rig.insert(TEXT, "t:a")
    node = rig.match(TEXT, "t:a").last_device_node
    rig.core.commit_backup(node, torch.arange(8), {})
    rig.evict(8)
    rig.core.pin(node)
    result = rig.core.drive_host_eviction(ComponentType.FULL, 8)
    assert not result.host_frees
    rig.core.unpin(node)
    result = rig.core.drive_host_eviction(ComponentType.FULL, 8)
    assert sum(map(len, result.host_frees.pop(ComponentType.FULL))) == 8


def test_taking_off_a_pin_that_is_not_there_is_an_error() -> None:
    rig = make_rig(64, 4)
    rig.insert(TEXT, "t:a")
    with pytest.raises(AssertionError, match="not pinned"):
        rig.core.unpin(rig.match(TEXT, "t:a").last_device_node)

"""Host memory no larger than HBM: copies of pages that are in HBM make room for what is not."""

from pathlib import Path

import pytest

from sglang_ext.radix.integrity import check_integrity, walk
from sglang_ext.types import Owner, Tier
from tests.sglang_ext.test_tiers import fetch, fill, load, page_bytes
from tests.sglang_ext.tiered import HBM, PAGE, TieredRig, tiered

SMALL = HBM // 2
TEXT = list(range(16))


def others(rig: TieredRig, count: int, first: int = 1000, owner: str = "t:b") -> None:
    for start in range(first, first + 16 * count, 16):
        rig.write(list(range(start, start + 16)), owner)


def copies(rig: TieredRig) -> int:
    """Return the tokens in host memory that are in HBM too."""
    return sum(len(node.key) for node in walk(rig.core) if len(node.tiers) == 2)


@pytest.mark.trial(54)
def test_what_the_disk_holds_comes_back_into_a_host_pool_full_of_copies(tmp_path: Path) -> None:
    with tiered(tmp_path, cpu=SMALL) as rig:
        fill(rig)
        rig.write(TEXT)
        before = page_bytes(rig, TEXT, "t:a").clone()
        others(rig, 5)
        assert rig.where(TEXT) == (0, 0)
        assert rig.cache.cache_controller.mem_pool_host.available_size() < len(TEXT)
        held = copies(rig)
        assert fetch(rig, TEXT, "t:a") == len(TEXT)
        assert copies(rig) == held - len(TEXT)
        load(rig, TEXT, "t:a")
        assert (page_bytes(rig, TEXT, "t:a") == before).all()


def test_every_new_text_reaches_the_disk(tmp_path: Path) -> None:
    with tiered(tmp_path, cpu=SMALL) as rig:
        others(rig, 4)
        token = rig.cache.store.bytes_per_token
        assert rig.cache.store.held_bytes()[Owner("t:b")] == 64 * token


def test_copies_leave_from_the_end_of_a_path_and_the_oldest_first(tmp_path: Path) -> None:
    with tiered(tmp_path, cpu=SMALL) as rig:
        rig.write([*TEXT, 100, 101, 102, 103])
        rig.write([*TEXT, 200, 201, 202, 203])
        rig.cache.evict_host(PAGE)
        check_integrity(rig.cache)
        found = {node.key.token_ids[0]: node.tiers for node in walk(rig.core)}
        assert found == {
            0: (Tier.HBM, Tier.CPU),
            100: (Tier.HBM,),
            200: (Tier.HBM, Tier.CPU),
        }


def test_a_path_without_copies_gets_them_before_what_continues_it_is_fetched(
    tmp_path: Path,
) -> None:
    """Else what the disk holds could not be hung in below it."""
    with tiered(tmp_path, cpu=SMALL) as rig:
        longer = [*TEXT, *range(100, 116)]
        rig.write(TEXT)
        rig.write(longer)
        rig.cache.evict_host(10**6)
        rig.evict(16)
        assert rig.where(longer) == (16, 0)
        assert not copies(rig)
        assert rig.cache.is_backuped(rig.match(longer).last_host_node)
        assert fetch(rig, longer, "t:a") == 16
        assert rig.where(longer) == (16, 16)


def test_a_copy_that_is_written_to_the_disk_stays(tmp_path: Path) -> None:
    with tiered(tmp_path, cpu=SMALL) as rig:
        held: list[object] = []
        controller = rig.cache.cache_controller
        controller.backup_queue.put, put = held.append, controller.backup_queue.put
        rig.insert(TEXT)
        while rig.cache.ongoing_write_through:
            rig.cache.check_hicache_events()
        assert rig.cache.evict_host(10**6) == 0
        for operation in held:
            put(operation)
        rig.settle()
        assert rig.cache.evict_host(10**6) == len(TEXT)
        assert rig.where(TEXT) == (16, 0)


def test_a_copy_of_a_page_in_use_may_go(tmp_path: Path) -> None:
    with tiered(tmp_path, cpu=SMALL) as rig:
        rig.insert(TEXT)
        lock = rig.cache.lock(rig.match(TEXT).last_device_node)
        rig.settle()
        assert rig.cache.evict_host(10**6) == len(TEXT)
        check_integrity(rig.cache)
        rig.cache.unlock(lock)
        check_integrity(rig.cache)
        assert rig.where(TEXT) == (16, 0)


def test_without_a_disk_a_copy_is_the_only_way_to_outlive_hbm() -> None:
    with tiered(cpu=SMALL) as rig:
        rig.write(TEXT)
        assert rig.cache.evict_host(10**6) == 0
        rig.evict(10**6)
        assert rig.where(TEXT) == (0, 16)

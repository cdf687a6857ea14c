"""HBM, CPU and NVMe on SGLang's own cache and pools: whose pages go down, and what comes back."""

from array import array
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.pool_host.base import _WRITE_BACK_STAGING_PAGE_CHUNK

from sglang_ext.namespace import frame
from sglang_ext.operations import OPERATIONS
from sglang_ext.radix.integrity import check_integrity, walk
from sglang_ext.tenancy.loader import parse_policy
from sglang_ext.tiering.placement import Lifetime
from sglang_ext.tiers import TenantStore
from sglang_ext.types import Owner, OwnerLimits, Tier
from tests.sglang_ext.tiered import PAGE, TieredRig, tiered

TEXT = list(range(16))
SYSTEM = list(range(500, 508))
REQUESTS = count()


def page_bytes(rig: TieredRig, tokens: list[int], owner: str) -> torch.Tensor:
    """Return what HBM holds for a text, all layers."""
    found = rig.match(tokens, owner)
    slots = rig.core.collect_full_device_indices(
        found.last_device_node, rig.core.root_node_handle()
    )
    pool = rig.allocator.get_kvcache()
    layers = [*pool.k_buffer, *pool.v_buffer]
    return torch.stack([layer.view(torch.uint8)[slots].flatten(1) for layer in layers])


def fill(rig: TieredRig) -> None:
    """Let every slot of HBM hold other bytes."""
    pool = rig.allocator.get_kvcache()
    for layer in [*pool.k_buffer, *pool.v_buffer]:
        layer.view(torch.uint8).random_(0, 256)


def leave_memory(rig: TieredRig) -> None:
    """Evict everything from HBM and CPU."""
    rig.evict(10**6)
    rig.cache.evict_host(10**6)
    assert not list(walk(rig.core))
    fill(rig)


def fetch(rig: TieredRig, tokens: list[int], owner: str) -> int:
    """Fetch from NVMe what neither HBM nor CPU has; return how many tokens CPU has then."""
    cache, handle = rig.cache, CacheRequestHandle(f"r{next(REQUESTS)}", 0)
    cache.prefetch_stop_policy = "wait_complete"
    found = rig.match(tokens, owner)
    start = found.device_prefix_len + found.host_hit_length
    node = found.last_host_node
    cache.prefetch_from_storage(
        handle,
        node,
        array("q", tokens[start:]),
        cache.get_last_hash_value(node),
        None,
        array("q", tokens[:start]),
        frame(Owner(owner)),
    )
    while not cache.check_prefetch_progress(handle):
        cache.check_hicache_events()
    cache.finish_storage_prefetch_admission(handle, cache.pop_prefetch_loaded_span(handle)[0], None)
    check_integrity(cache)
    assert not cache._fetches
    return rig.where(tokens, owner)[1]


def load(rig: TieredRig, tokens: list[int], owner: str) -> None:
    """Load what CPU has of a text into HBM."""
    assert rig.cache.load_back(rig.match(tokens, owner).best_match_node)
    rig.cache.ready_to_load_host_cache()
    rig.settle()


def keys(rig: TieredRig) -> dict[str, set[str]]:
    """Return the page hashes in the tree, by owner."""
    found: dict[str, set[str]] = {}
    for node in walk(rig.core):
        found.setdefault(node.owner, set()).update(node.hash_value)
    return found


def test_a_page_comes_back_from_the_disk_bit_for_bit(tmp_path: Path) -> None:
    with tiered(tmp_path) as rig:
        fill(rig)
        rig.write(TEXT)
        before = page_bytes(rig, TEXT, "t:a").clone()
        leave_memory(rig)
        assert fetch(rig, TEXT, "t:a") == 16
        load(rig, TEXT, "t:a")
        assert torch.equal(page_bytes(rig, TEXT, "t:a"), before)


@pytest.mark.trial(5)
@pytest.mark.trial(6)
def test_the_same_text_of_two_sealed_tenants_has_keys_and_bytes_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Public text included: nothing of it is public to them."""
    monkeypatch.setenv("SEALED_TIERS", "5e" * 32)
    tenants = "a: {isolation: sealed}, b: {isolation: sealed}"
    key = "env:SEALED_TIERS"
    with tiered(tmp_path, public=[SYSTEM], tenants=tenants, master_key=key) as rig:
        for owner in ("s:a", "s:b"):
            rig.write([*SYSTEM, *TEXT], owner)
        found = keys(rig)
        assert set(found) == {"s:a", "s:b"}
        assert not found["s:a"] & found["s:b"]
        leave_memory(rig)
        assert fetch(rig, [*SYSTEM, *TEXT], "s:a") == len([*SYSTEM, *TEXT])
        held = rig.cache.store.held_bytes()
        assert held["s:a"] == held["s:b"] > 0
        rig.cache.flush(Owner("s:a"))
        assert fetch(rig, [*SYSTEM, *TEXT], "s:a") == 0
        assert fetch(rig, [*SYSTEM, *TEXT], "s:b") == len([*SYSTEM, *TEXT])


@pytest.mark.trial(5)
@pytest.mark.trial(6)
def test_the_same_text_of_two_tenants_has_keys_and_bytes_of_its_own(tmp_path: Path) -> None:
    """Also behind a public run, whose pages belong to nobody."""
    with tiered(tmp_path, public=[SYSTEM]) as rig:
        for owner in ("t:a", "t:b"):
            rig.write(TEXT, owner)
            rig.write([*SYSTEM, *TEXT], owner)
        found = keys(rig)
        assert not found["t:a"] & found["t:b"]
        assert not found[""] & (found["t:a"] | found["t:b"])
        held = rig.cache.store.held_bytes()
        assert held["t:a"] == held["t:b"] == 4 * held[""]


def test_a_tenant_fetches_nothing_of_another(tmp_path: Path) -> None:
    with tiered(tmp_path) as rig:
        rig.write(TEXT, "t:a")
        leave_memory(rig)
        assert fetch(rig, TEXT, "t:b") == 0
        assert fetch(rig, TEXT, "t:a") == 16


def test_a_dump_shows_every_tier_that_holds_a_run(tmp_path: Path) -> None:
    with tiered(tmp_path, public=[SYSTEM]) as rig:
        rig.write([*SYSTEM, *TEXT], "t:a")
        rig.write([*SYSTEM, *TEXT], "t:b")
        rig.cache.store.delete_owner(Owner("t:b"))
        shown = OPERATIONS["tree"](SimpleNamespace(tree_cache=rig.cache), {"page": 0, "limit": 9})
        found = {run["owner"]: (run["tiers"], run["stored"]) for run in shown["runs"]}
        assert found == {
            "": (["hbm", "cpu", "nvme"], {"nvme": len(SYSTEM)}),
            "t:a": (["hbm", "cpu", "nvme"], {"nvme": len(TEXT)}),
            "t:b": (["hbm", "cpu"], {}),
        }
        leave_memory(rig)
        shown = OPERATIONS["tree"](SimpleNamespace(tree_cache=rig.cache), {"page": 0, "limit": 9})
        assert shown["runs"] == []
        assert {held["owner"] for held in shown["lower"]} == {"", "t:a"}


@pytest.mark.parametrize("system", [SYSTEM, SYSTEM[:PAGE]])
def test_one_fetch_brings_public_and_private_pages(tmp_path: Path, system: list[int]) -> None:
    """As after a restart, when neither side is in memory."""
    with tiered(tmp_path, public=[system]) as rig:
        fill(rig)
        text = [*system, *TEXT]
        rig.write(text, "t:a")
        before = page_bytes(rig, text, "t:a").clone()
        leave_memory(rig)
        assert fetch(rig, text, "t:b") == len(system)
        leave_memory(rig)
        assert fetch(rig, text, "t:a") == len(text)
        load(rig, text, "t:a")
        assert torch.equal(page_bytes(rig, text, "t:a"), before)
        tokens = {outcome.value: tokens for outcome, tokens in rig.cache.fetched.items() if tokens}
        assert tokens == {"issued": len(text) + len(system), "useful": len(text) + len(system)}


@pytest.mark.parametrize("copied", [True, False])
def test_private_pages_come_back_behind_a_public_run_in_hbm(tmp_path: Path, copied: bool) -> None:
    with tiered(tmp_path, public=[SYSTEM]) as rig:
        text = [*SYSTEM, *TEXT]
        rig.write(text, "t:a")
        rig.evict(len(TEXT))
        rig.cache.evict_host(len(TEXT) if copied else 10**6)
        assert rig.where(text, "t:a") == (len(SYSTEM), 0)
        assert fetch(rig, text, "t:a") == len(TEXT)
        assert fetch(rig, text, "t:b") == 0


def test_a_lost_page_is_a_miss_and_what_lies_before_it_a_hit(tmp_path: Path) -> None:
    with tiered(tmp_path) as rig:
        rig.write(TEXT)
        (slab,) = tmp_path.rglob("*.slab")
        leave_memory(rig)
        with slab.open("r+b") as file:
            file.seek(rig.cache.store.bytes_per_token * PAGE * 5 // 2)
            (byte,) = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))
        assert fetch(rig, TEXT, "t:a") in (0, PAGE, 2 * PAGE, 3 * PAGE)
        assert rig.cache.store.counters()["corrupt"] == 1


def test_pages_on_disk_are_deleted_at_their_time(tmp_path: Path) -> None:
    with tiered(tmp_path) as rig:
        now = [0.0]
        life = Lifetime(hbm_ms=10**9, cpu_ms=10**9, nvme_ms=60_000)
        rig.age({"t:a": life}, wall_clock=lambda: now[0])
        rig.write(TEXT, "t:a")
        rig.write(TEXT, "t:b")
        store = rig.cache.store
        written = rig.cache.store.backend.store._clock()
        now[0] = written + 30
        rig.later(1000)
        assert set(store.owners()) == {"t:a", "t:b"}
        now[0] = written + 3600
        rig.later(1000)
        assert store.owners() == ["t:b"]


def test_a_flush_takes_a_tenant_out_of_every_tier_and_nobody_else(tmp_path: Path) -> None:
    with tiered(tmp_path) as rig:
        rig.write(TEXT, "t:a")
        rig.write(TEXT, "t:b")
        pin = rig.cache.pin_prefix(rig.key(TEXT), Owner("t:a"))
        assert pin.tokens == 16
        flushed = rig.cache.flush(Owner("t:a"))
        check_integrity(rig.cache)
        assert flushed.freed == {Tier.HBM: 16, Tier.CPU: 16}
        assert flushed.in_use == {Tier.HBM: 0, Tier.CPU: 0}
        assert flushed.disk_bytes > 0
        assert rig.cache.store.owners() == ["t:b"]
        assert rig.where(TEXT, "t:a") == (0, 0)
        assert rig.where(TEXT, "t:b") == (16, 0)
        assert fetch(rig, TEXT, "t:a") == 0


def test_a_flush_leaves_what_is_in_use_and_says_so(tmp_path: Path) -> None:
    with tiered(tmp_path) as rig:
        rig.write(TEXT)
        lock = rig.cache.lock(rig.match(TEXT).last_device_node)
        flushed = rig.cache.flush(Owner("t:a"))
        assert flushed.in_use[Tier.HBM] == 16
        rig.cache.unlock(lock)
        assert rig.cache.flush(Owner("t:a")).freed[Tier.HBM] == 16


def test_pages_on_their_way_down_do_not_outlive_a_flush(tmp_path: Path) -> None:
    with tiered(tmp_path) as rig:
        queue: list[Any] = []
        rig.cache.cache_controller.backup_queue.put, put = (
            queue.append,
            rig.cache.cache_controller.backup_queue.put,
        )
        rig.insert(TEXT)
        while rig.cache.ongoing_write_through:
            rig.cache.check_hicache_events()
        rig.cache.flush(Owner("t:a"))
        for operation in queue:
            put(operation)
        rig.settle()
        assert queue and rig.cache.store.owners() == []


@pytest.mark.trial(49)
def test_other_weights_delete_every_page(tmp_path: Path) -> None:
    with tiered(tmp_path) as rig:
        rig.write(TEXT)
        leave_memory(rig)
        rig.cache.weights_changed(flushed=True)
        assert fetch(rig, TEXT, "t:a") == 0
        rig.write(TEXT)
        assert rig.cache.store.owners() == ["t:a"]


def test_other_weights_without_a_flush_turn_the_disk_off(tmp_path: Path) -> None:
    with tiered(tmp_path) as rig:
        rig.write(TEXT)
        leave_memory(rig)
        rig.cache.weights_changed(flushed=False)
        assert fetch(rig, TEXT, "t:a") == 0


def test_quotas_of_the_disk_are_bytes_of_whole_pages(tmp_path: Path) -> None:
    policy = parse_policy(
        "version: 1\ntenants:\n"
        "  a: {quota: {nvme: 32tok, hard: true}}\n"
        "  b: {reserve: {nvme: 16tok}, quota: {nvme: 25%}}\n"
    )
    with tiered(tmp_path) as rig:
        store = TenantStore(rig.cache.store.backend, policy, str)
        assert store.limits(Owner("t:a")) == OwnerLimits(32, True, 0, 1.0, 1)
        rig.cache.store = store
        for start in range(0, 64, 16):
            rig.write(list(range(start, start + 16)), "t:a")
        assert store.held_bytes()[Owner("t:a")] == 32 // PAGE * (store.bytes_per_token * PAGE)


def test_without_a_tier_there_is_no_store() -> None:
    with tiered() as rig:
        assert rig.cache.store is None
        rig.write(TEXT)
        rig.cache.weights_changed(flushed=False)
        assert rig.cache.flush(Owner("t:a")).disk_bytes == 0


def test_what_is_reserved_on_the_disk_is_not_taken_for_others(tmp_path: Path) -> None:
    policy = parse_policy("version: 1\ntenants: {a: {}, b: {reserve: {nvme: 16tok}}}")
    with tiered(tmp_path) as rig:
        backend = rig.cache.store.backend
        TenantStore(backend, policy, str)
        token = backend.bytes_per_token
        limits = backend.store._space.caps.limits
        assert (limits[Owner("t:a")].reserve_bytes, limits[Owner("t:b")].reserve_bytes) == (
            0,
            16 * token,
        )


@pytest.mark.trial(56)
def test_what_the_tiers_cost_in_hbm_is_as_written(tmp_path: Path) -> None:
    """The README's figure is SGLang's: a buffer that copies pass through, of so many pages."""
    readme = Path(__file__).parents[2] / "README.md"
    assert f"at most {_WRITE_BACK_STAGING_PAGE_CHUNK} pages" in readme.read_text(encoding="utf-8")
    with tiered(tmp_path) as rig:
        pools = rig.cache.host_pool_group.entries
        assert pools
        for entry in pools:
            assert entry.host_pool.staging_page_capacity == 0, "without a GPU there is none"

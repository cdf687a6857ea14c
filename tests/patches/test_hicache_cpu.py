"""Host pools on a CPU: SGLang's own classes, copied out and back bit for bit."""

import os
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache import l2_transfer
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host import base, mha, mla
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from sglang_ext.errors import HookError
from sglang_ext.patches import hicache_cpu
from sglang_ext.patches.hicache_cpu import copy_pages, enable_hicache

PAGE = 4
TOKENS = 32
LAYERS = 3


def mha_pools(dtype: torch.dtype) -> tuple[Any, Any, list[torch.Tensor]]:
    device = MHATokenToKVPool(TOKENS, PAGE, dtype, 2, 8, LAYERS, "cpu", False)
    host = MHATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        2.0,
        0,
        PAGE,
        "layer_first",
        device_capacity_tokens=TOKENS,
        start_layer=0,
        end_layer=LAYERS - 1,
    )
    return device, host, [*device.k_buffer, *device.v_buffer]


def mla_pools(dtype: torch.dtype) -> tuple[Any, Any, list[torch.Tensor]]:
    device = MLATokenToKVPool(TOKENS, PAGE, dtype, 24, 8, LAYERS, "cpu", False)
    host = MLATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        2.0,
        0,
        PAGE,
        "layer_first",
        override_kv_cache_dim=device.kv_cache_dim,
        device_capacity_tokens=TOKENS,
        start_layer=0,
        end_layer=LAYERS - 1,
        target_layer_num=LAYERS,
    )
    return device, host, list(device.kv_buffer)


def slots(*pages: int) -> torch.Tensor:
    """Return the tokens of these pages."""
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def as_bytes(layers: list[torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    return torch.stack([layer.view(torch.uint8)[tokens].flatten(1) for layer in layers])


@pytest.mark.parametrize("make", [mha_pools, mla_pools], ids=["mha", "mla"])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.float8_e5m2, torch.float8_e4m3fn], ids=str
)
def test_pages_come_back_bit_for_bit_and_nothing_else_moves(
    make: Callable[[torch.dtype], tuple[Any, Any, list[torch.Tensor]]], dtype: torch.dtype
) -> None:
    enable_hicache()
    device, host, layers = make(dtype)
    for layer in layers:
        layer.view(torch.uint8).random_(0, 256)
    everything = torch.arange(TOKENS + PAGE)
    before = as_bytes(layers, everything)
    source, below, target = slots(1, 6, 3), slots(9, 0, 12), slots(7, 2, 5)
    host.backup_from_device_all_layer(device, below, source, "direct")
    for layer_id in range(LAYERS):
        host.load_to_device_per_layer(device, below, target, layer_id, "direct")
    expected = before.clone()
    expected[:, target] = before[:, source]
    assert torch.equal(as_bytes(layers, everything), expected)


@pytest.mark.parametrize("make", [mha_pools, mla_pools], ids=["mha", "mla"])
def test_host_memory_is_ordinary_also_where_a_fetched_page_lands(make: Any) -> None:
    """SGLang asks for pinned memory there, which fails page by page and is only logged."""
    enable_hicache()
    _, host, _ = make(torch.bfloat16)
    assert not host.pin_memory
    assert host.get_dummy_flat_data_page().numel() > 0


def test_a_small_machine_keeps_a_tenth_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 10**6, "SC_PAGE_SIZE": 4096}.__getitem__)
    monkeypatch.setattr(base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 10 * 2**30)
    enable_hicache()
    assert base.HICACHE_HOST_MEMORY_RESERVE_BYTES == 409_600_000


def test_enabling_twice_changes_nothing_more() -> None:
    enable_hicache()
    before = base.HostKVCache.__init__, mha.transfer_kv_direct, mla.transfer_kv_direct
    enable_hicache()
    assert (base.HostKVCache.__init__, mha.transfer_kv_direct, mla.transfer_kv_direct) == before


def test_a_stock_kernel_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = object()
    monkeypatch.setattr(mha, "transfer_kv_direct", stock, raising=False)
    enable_hicache()
    assert mha.transfer_kv_direct is stock


def test_a_pool_that_copies_otherwise_is_refused() -> None:
    def load() -> None:
        pass

    with pytest.raises(HookError, match="load does not call transfer_kv_direct"):
        hicache_cpu._offer_copy(ModuleType("pools"), load)


def test_a_reserve_under_another_name_is_refused() -> None:
    with pytest.raises(HookError, match="has no HICACHE_HOST_MEMORY_RESERVE_BYTES"):
        hicache_cpu._lower_reserve(ModuleType("pools"))


def test_a_pool_that_pins_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "HostKVCache", SimpleNamespace(__init__=lambda self: None))
    with pytest.raises(HookError, match="HostKVCache has no pin_memory"):
        enable_hicache()


def test_a_copy_needs_as_many_layers_on_both_sides() -> None:
    layer = torch.zeros(PAGE, 1)
    with pytest.raises(ValueError, match="zip"):
        copy_pages([layer], [layer, layer], slots(0), slots(0), PAGE)


def test_copies_tell_how_long_they_took() -> None:
    enable_hicache()
    start, end, timed = l2_transfer.make_timing_event_pair()
    assert timed
    start.record()
    end.record()
    assert end.query()
    assert start.elapsed_time(end) >= 0
    start.at, end.at = 1.0, 1.25
    assert start.elapsed_time(end) == 250

"""The one-pass operators against SGLang's own, on the layers of a model."""

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

from sglang_ext.patches import cpu_ops
from sglang_ext.patches.cpu_library import load_library

# Ours round once where SGLang's chains round two or three times: two steps of bfloat16.
_CLOSE = {"rtol": 1.6e-2, "atol": 1.6e-2}


@pytest.fixture(scope="module", autouse=True)
def library() -> ctypes.CDLL:
    loaded = load_library()
    if loaded is None:
        pytest.skip("no kernels here")
    return loaded


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(BaseFusedOp, "_oot_forward_registry", {})
    yield


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norm_layer(width: int, **options: Any) -> RMSNorm:
    layer = RMSNorm(width, eps=1e-5, **options)
    layer.weight.data = noise(width, seed=9)
    return layer


@pytest.mark.parametrize("rows", [1, 3, 200])
@pytest.mark.parametrize("width", [16, 576, 4096])
def test_norm_equals_sglangs(rows: int, width: int) -> None:
    layer, x = norm_layer(width), noise(rows, width)
    expected = layer.forward_native(x)
    torch.testing.assert_close(cpu_ops._norm_forward(layer, x), expected, **_CLOSE)


@pytest.mark.parametrize("rows", [1, 200])
def test_norm_adds_the_residual(rows: int) -> None:
    layer, x, residual = norm_layer(576), noise(rows, 576), noise(rows, 576, seed=1)
    expected, expected_residual = layer.forward_native(x, residual)
    found, found_residual = cpu_ops._norm_forward(layer, x, residual.clone())
    torch.testing.assert_close(found, expected, **_CLOSE)
    assert torch.equal(found_residual, expected_residual)


@pytest.mark.parametrize("rows", [1, 200])
def test_activation_equals_sglangs(rows: int) -> None:
    x = 4 * noise(rows, 2 * 1536)
    expected = SiluAndMul().forward_native(x)
    torch.testing.assert_close(cpu_ops._activation_forward(SiluAndMul(), x), expected, **_CLOSE)


def test_activation_of_huge_numbers_stays_finite() -> None:
    x = torch.tensor([[-3e38, -100.0, 0.0, 100.0, 3e38] * 16 + [1.0] * 80]).bfloat16()
    found = cpu_ops._activation_forward(SiluAndMul(), x)
    torch.testing.assert_close(found, SiluAndMul().forward_native(x), rtol=1.6e-2, atol=1e-30)


def test_what_is_not_a_number_stays_so() -> None:
    x = noise(2, 576)
    x[1, 5] = torch.nan
    for found in (
        cpu_ops._norm_forward(norm_layer(576), x),
        cpu_ops._activation_forward(SiluAndMul(), x),
    ):
        assert not found[0].isnan().any()
        assert found[1].isnan().any()


@pytest.mark.parametrize("rows", [1, 200])
@pytest.mark.parametrize("cache_type", [torch.bfloat16, torch.float32])
def test_rotary_equals_sglangs(rows: int, cache_type: torch.dtype) -> None:
    embedding = RotaryEmbedding(64, 64, 512, 10_000, True, torch.bfloat16)
    embedding.cos_sin_cache = embedding.cos_sin_cache.to(cache_type)
    positions = torch.randint(512, (rows,), generator=torch.Generator().manual_seed(0))
    # As in a model: queries, keys and values of a row lie side by side.
    query, key, value = noise(rows, 15 * 64).split([9 * 64, 3 * 64, 3 * 64], dim=1)
    untouched = value.clone()
    expected = embedding.forward_native(positions, query.clone(), key.clone())
    found = cpu_ops._rotary_forward(embedding, positions, query, key)
    for each, other in zip(found, expected, strict=True):
        torch.testing.assert_close(each, other, rtol=2e-2, atol=4e-2)
    assert torch.equal(value, untouched)


@pytest.mark.parametrize(
    "options, x",
    [
        ({}, noise(2, 576, dtype=torch.float32)),
        ({}, noise(576, 2).t()),
        ({"cast_x_before_out_mul": True}, noise(2, 576)),
        ({"fp32_residual": True}, noise(2, 576)),
        ({"var_hidden_size": 64}, noise(2, 576)),
    ],
    ids=["float32", "gaps", "cast first", "float32 residual", "partial variance"],
)
def test_norms_of_another_kind_are_sglangs(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], x: torch.Tensor
) -> None:
    layer = norm_layer(576, **options)
    monkeypatch.setattr(cpu_ops, "rms_norm", None)
    assert torch.equal(cpu_ops._norm_forward(layer, x), layer.forward_native(x))


def test_rotary_of_another_kind_is_sglangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_ops, "rotary", None)
    positions = torch.arange(3)
    for embedding in (
        RotaryEmbedding(64, 64, 512, 10_000, False, torch.bfloat16),
        RotaryEmbedding(64, 32, 512, 10_000, True, torch.bfloat16),
    ):
        query, key = noise(3, 4 * 64), noise(3, 2 * 64, seed=1)
        expected = embedding.forward_native(positions, query, key)
        found = cpu_ops._rotary_forward(embedding, positions, query, key)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_without_kernels_nothing_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_ops, "load_library", lambda: None)
    assert not cpu_ops.register_ops("native")
    assert BaseFusedOp._oot_forward_registry == {}


def test_sglang_finds_them_in_its_registry() -> None:
    assert cpu_ops.register_ops("native")
    found = BaseFusedOp._oot_forward_registry["native"]
    assert found[RMSNorm] is cpu_ops._norm_forward
    assert found[SiluAndMul] is cpu_ops._activation_forward
    assert found[RotaryEmbedding] is cpu_ops._rotary_forward

"""The C++ decode kernel against plain torch: it builds, agrees, and steps aside where it must."""

import ctypes
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sglang_ext.patches import cpu_library
from sglang_ext.patches.cpu_attention_kernel import (
    DecodeKernel,
    ExtendKernel,
    load_decode_kernel,
    load_extend_kernel,
)
from sglang_ext.patches.cpu_attention_meta import Reach, Step
from sglang_ext.patches.cpu_attention_ops import Scoring, attend_decode, attend_extend, gather
from sglang_ext.patches.cpu_library import build_library, load_library

_SLOTS = 4096


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> DecodeKernel:
    try:
        library = build_library(tmp_path_factory.mktemp("kernel"))
    except OSError as error:
        pytest.skip(str(error))
    return DecodeKernel(ctypes.CDLL(str(library)))


@pytest.fixture(scope="module")
def extend_kernel() -> ExtendKernel:
    load_extend_kernel.cache_clear()
    kernel = load_extend_kernel()
    if kernel is None:
        pytest.skip("no products of bfloat16 here")
    return kernel


@pytest.fixture(autouse=True)
def fresh_load() -> Iterator[None]:
    loaders = (load_library, load_decode_kernel, load_extend_kernel)
    for loader in loaders:
        loader.cache_clear()
    yield
    for loader in loaders:
        loader.cache_clear()


def scattered(lengths: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return a line of slots for each request, none of them twice, in no order."""
    table = torch.randperm(_SLOTS, generator=generator).int()[: sum(lengths)]
    lines = torch.zeros(len(lengths), max(lengths), dtype=torch.int32)
    for line, part in enumerate(table.split(list(lengths))):
        lines[line, : len(part)] = part
    return lines


def compare(
    kernel: DecodeKernel,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    heads: int = 6,
    lengths: tuple[int, ...] = (1, 900, 64, 17, 500, 63),
    window: int = -1,
    soft_cap: float = 0.0,
) -> None:
    """Decode one batch both ways."""
    generator = torch.Generator().manual_seed(1)
    lines = scattered(lengths, generator)
    step = Step(lines, torch.arange(len(lengths)), lengths, None, torch.float32)
    query = torch.randn(len(lengths), heads, keys.shape[-1], generator=generator)
    scoring = Scoring(1 / math.sqrt(keys.shape[-1]), soft_cap)
    reach = Reach(window, False)
    assert kernel.takes(query, keys, values.shape[-1])
    found = kernel.attend(query, keys, values, step.ragged(reach), scoring)
    for group in step.decode(reach):
        pages = (
            gather(buffer.contiguous(), group.slots, torch.float32) for buffer in (keys, values)
        )
        expected = attend_decode(query[group.requests], *pages, group, scoring)
        torch.testing.assert_close(found[group.requests], expected, rtol=1e-4, atol=1e-4)


def pages(
    kv_heads: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(_SLOTS, kv_heads, width, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DecodeKernel.page_types)
def test_every_type_of_page(kernel: DecodeKernel, dtype: torch.dtype) -> None:
    compare(kernel, pages(2, 64, dtype), pages(2, 64, dtype, seed=2))


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (9, 3), (4, 2), (8, 1), (14, 2), (5, 5)])
@pytest.mark.parametrize("width", [16, 64, 80, 192])
def test_every_grouping_and_width(
    kernel: DecodeKernel, heads: int, kv_heads: int, width: int
) -> None:
    compare(kernel, pages(kv_heads, width), pages(kv_heads, width, seed=2), heads=heads)


@pytest.mark.parametrize("window", [-1, 0, 20, 4000])
@pytest.mark.parametrize("soft_cap", [0.0, 0.5, 30.0])
def test_windows_and_soft_caps(kernel: DecodeKernel, window: int, soft_cap: float) -> None:
    compare(kernel, pages(2, 64), pages(2, 64, seed=2), window=window, soft_cap=soft_cap)


def test_latent_pages_are_keys_and_values(kernel: DecodeKernel) -> None:
    latent = pages(1, 576, torch.bfloat16)
    compare(kernel, latent, latent[..., :512], heads=16)


def test_values_narrower_than_keys(kernel: DecodeKernel) -> None:
    compare(kernel, pages(2, 192), pages(2, 128, seed=2))


def test_fp8_codes_are_read_exactly(kernel: DecodeKernel) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        finite = codes[codes.view(dtype).float().isfinite()]
        values = finite.view(dtype).view(-1, 1, 1).expand(-1, 1, 16).contiguous()
        step = Step(torch.arange(len(finite)).int().view(-1, 1), torch.arange(len(finite)),
                    [1] * len(finite), None, torch.float32)  # fmt: skip
        query = torch.zeros(len(finite), 1, 16)
        found = kernel.attend(query, values, values, step.ragged(Reach(-1, False)), Scoring(1.0))
        assert torch.equal(found[:, 0, 0], finite.view(dtype).float())


def test_pages_it_cannot_read_are_declined(kernel: DecodeKernel) -> None:
    query = torch.zeros(1, 2, 64)
    assert not kernel.takes(query, pages(2, 60), 60)
    assert not kernel.takes(query, pages(2, 64), 60)
    assert not kernel.takes(query, pages(2, 64, torch.float16), 64)
    assert not kernel.takes(query, pages(2, 64).transpose(1, 2), 64)


def compare_extend(
    kernel: ExtendKernel,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    heads: int = 6,
    lengths: tuple[int, ...] = (300, 700, 64, 17, 500, 1),
    cached: tuple[int, ...] = (0, 684, 0, 1, 300, 0),
    window: int = -1,
    soft_cap: float = 0.0,
) -> None:
    """Extend one batch both ways; plain torch in float32, from the same bfloat16 numbers."""
    generator = torch.Generator().manual_seed(1)
    lines = scattered(lengths, generator)
    step = Step(lines, torch.arange(len(lengths)), lengths, cached, torch.float32)
    rows = sum(lengths) - sum(cached)
    query = torch.randn(rows, heads, keys.shape[-1], generator=generator).bfloat16()
    scoring = Scoring(1 / math.sqrt(keys.shape[-1]), soft_cap)
    plan = step.extend(Reach(window, False))
    assert kernel.takes(query, keys, values.shape[-1])
    found = kernel.attend(query, keys, values, plan, scoring)
    for run in plan.runs:
        read = [gather(each.contiguous(), run.slots, torch.float32) for each in (keys, values)]
        own = query[run.begin : run.end].float()
        expected = attend_extend(own, *read, run, plan, scoring)
        # Weights and results are rounded to bfloat16, 1 part in 256.
        torch.testing.assert_close(
            found[run.begin : run.end].float(), expected, rtol=8e-3, atol=8e-3
        )


@pytest.mark.parametrize("dtype", ExtendKernel.page_types)
def test_extend_reads_every_type_of_page(extend_kernel: ExtendKernel, dtype: torch.dtype) -> None:
    compare_extend(extend_kernel, pages(2, 64, dtype), pages(2, 64, dtype, seed=2))


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (9, 3), (8, 1), (14, 2)])
@pytest.mark.parametrize("width", [16, 64, 80, 192])
def test_extend_of_every_grouping_and_width(
    extend_kernel: ExtendKernel, heads: int, kv_heads: int, width: int
) -> None:
    keys, values = (pages(kv_heads, width, torch.bfloat16, seed) for seed in (0, 2))
    compare_extend(extend_kernel, keys, values, heads=heads)


@pytest.mark.parametrize("window", [-1, 0, 20, 130, 4000])
@pytest.mark.parametrize("soft_cap", [0.0, 0.5, 30.0])
def test_extend_under_windows_and_soft_caps(
    extend_kernel: ExtendKernel, window: int, soft_cap: float
) -> None:
    keys, values = (pages(2, 64, torch.bfloat16, seed) for seed in (0, 2))
    compare_extend(extend_kernel, keys, values, window=window, soft_cap=soft_cap)


def test_extend_of_latent_pages_and_of_narrow_values(extend_kernel: ExtendKernel) -> None:
    latent = pages(1, 576, torch.bfloat16)
    compare_extend(extend_kernel, latent, latent[..., :512], heads=16)
    keys = pages(2, 192, torch.bfloat16)
    compare_extend(extend_kernel, keys, pages(2, 128, torch.bfloat16, seed=2))


def test_extend_declines_float32(extend_kernel: ExtendKernel) -> None:
    assert not extend_kernel.takes(torch.zeros(1, 2, 64), pages(2, 64, torch.bfloat16), 64)
    assert not extend_kernel.takes(torch.zeros(1, 2, 64).bfloat16(), pages(2, 64), 64)


def test_a_library_is_built_once(kernel: DecodeKernel, tmp_path: Path) -> None:
    first = build_library(tmp_path)
    stamp = first.stat().st_mtime_ns
    assert build_library(tmp_path) == first
    assert first.stat().st_mtime_ns == stamp
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


def test_without_a_compiler_torch_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    assert load_decode_kernel() is None
    assert load_extend_kernel() is None
    assert "plain torch serves" in caplog.text


def test_a_compiler_that_fails_leaves_nothing_behind(
    kernel: DecodeKernel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu_library, "_FLAGS", ["--no-such-flag"])
    assert load_library() is None
    assert list((tmp_path / "sglang-ext").iterdir()) == []


def test_kernels_that_compute_wrongly_are_not_used(
    kernel: DecodeKernel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for kind in (DecodeKernel, ExtendKernel):
        monkeypatch.setattr(kind, "attend", lambda self, query, *rest: torch.zeros_like(query))
    assert load_decode_kernel() is None
    assert load_extend_kernel() is None
    assert "computes wrongly" in caplog.text

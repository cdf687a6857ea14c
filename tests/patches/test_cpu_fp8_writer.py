"""The kernel that writes FP8 pages, against the plain torch of the quantizer."""

import pytest
import torch

from sglang_ext.patches import cpu_fp8_writer
from sglang_ext.patches.cpu_fp8_writer import Fp8Writer
from sglang_ext.patches.cpu_library import load_library
from sglang_ext.tiering.feedback import learn_feedback
from sglang_ext.tiering.quantizer import E4M3, FORMATS, Channels, Format, dequantize, quantize

pytestmark = pytest.mark.skipif(load_library() is None, reason="no C++ compiler or no AVX-512")
_EACH = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)


def _rows(tokens: int, heads: int, dim: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    spread = torch.exp2(torch.randint(-4, 4, (heads, dim), generator=generator).float())
    return (torch.randn(tokens, heads, dim, generator=generator) * spread).bfloat16()


def _channels(heads: int, dim: int) -> Channels:
    generator = torch.Generator().manual_seed(dim)
    exponents = torch.randint(-4, 4, (heads, dim), generator=generator)
    return Channels(torch.exp2(exponents.float()), torch.randn(heads, dim, generator=generator))


def _with_feedback(channels: Channels) -> Channels:
    heads, dim = channels.scale.shape
    queries = torch.randn(heads, 3 * dim, dim, generator=torch.Generator().manual_seed(1))
    queries[..., 1:] += 2 * queries[..., :-1]
    moment = queries.transpose(1, 2) @ queries
    feedback = learn_feedback(moment, channels.scale, torch.ones(heads, dim))
    return Channels(channels.scale, channels.mean, feedback)


@_EACH
def test_every_bfloat16_number_becomes_the_nearest_code(format: Format) -> None:
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    rows = numbers.view(-1, 1, 64)
    neutral = Channels.neutral(1, 64)
    found = Fp8Writer(neutral, format).codes(rows).view(torch.uint8)
    expected = quantize(rows, neutral, format).codes.view(torch.uint8)
    number = ~rows.isnan()
    assert torch.equal(found[number], expected[number])
    assert torch.isnan(found.view(format.dtype).float()[~number]).all()


@_EACH
@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 200])
@pytest.mark.parametrize(("heads", "dim"), [(1, 8), (3, 64), (2, 128), (1, 256)])
def test_plain_rows_become_the_codes_of_torch(
    format: Format, tokens: int, heads: int, dim: int
) -> None:
    rows, channels = _rows(tokens, heads, dim), _channels(heads, dim)
    found = Fp8Writer(channels, format).codes(rows)
    assert found.dtype == format.dtype
    assert torch.equal(found.float(), quantize(rows, channels, format).codes.float())


@_EACH
@pytest.mark.parametrize("tokens", [1, 17, 200])
@pytest.mark.parametrize(("heads", "dim"), [(1, 7), (3, 64), (2, 128)])
def test_feedback_hands_on_what_torch_does(
    format: Format, tokens: int, heads: int, dim: int
) -> None:
    """Sums in another order may tip a number near a tie, and all that follow in its head."""
    rows, channels = _rows(tokens, heads, dim), _with_feedback(Channels.neutral(heads, dim))
    found = Fp8Writer(channels, format).codes(rows).float()
    expected = quantize(rows, channels, format).codes.float()
    assert (found == expected).float().mean() > 0.99
    plain = quantize(rows, Channels.neutral(heads, dim), format).codes.float()
    assert not torch.equal(found, plain)


def test_rows_between_other_rows_are_read_where_they_lie() -> None:
    whole = _rows(20, 6, 64)
    rows, channels = whole[:, 2:4], _with_feedback(_channels(2, 64))
    found = Fp8Writer(channels, E4M3).codes(rows)
    assert torch.equal(found.float(), Fp8Writer(channels, E4M3).codes(rows.contiguous()).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_types_are_written_by_torch(dtype: torch.dtype) -> None:
    rows, channels = _rows(5, 2, 16).clamp(-100, 100).to(dtype), _channels(2, 16)
    back = dequantize(quantize(rows, channels, E4M3), channels)
    found = Fp8Writer(channels, E4M3).codes(rows).float() * channels.scale + channels.mean
    assert torch.equal(found, back)


def test_a_kernel_that_writes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(_kernel: object, rows: torch.Tensor) -> torch.Tensor:
        return torch.zeros(rows.shape).to(E4M3.dtype)

    monkeypatch.setattr(cpu_fp8_writer._Kernel, "__call__", nothing)
    cpu_fp8_writer._checked_library.cache_clear()
    try:
        rows, channels = _rows(20, 2, 32), _channels(2, 32)
        found = Fp8Writer(channels, E4M3).codes(rows).float()
        assert torch.equal(found, quantize(rows, channels, E4M3).codes.float())
    finally:
        cpu_fp8_writer._checked_library.cache_clear()

"""Round trips through FP8: never further off than the docstring's bound, whatever goes in."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.tiering.channel_statistics import HEADROOM, ChannelStatistics
from sglang_ext.tiering.quantizer import (
    E4M3,
    E5M2,
    FORMATS,
    Channels,
    Format,
    dequantize,
    error_bound,
    quantize,
    require_finite,
    within_range,
)

_FORMATS = st.sampled_from([E4M3, E5M2])


def _rows(seed: int, tokens: int = 32, spread: float = 1.0, offset: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(tokens, 3, 8, generator=generator) * spread
    return rows + offset * torch.randn(3, 8, generator=generator)


def _learned(rows: torch.Tensor, format: Format, *, centred: bool = True) -> Channels:
    statistics = ChannelStatistics(rows.shape[1], rows.shape[2])
    statistics.add(rows)
    return statistics.channels(format, centred=centred)


def _error(rows: torch.Tensor, format: Format, channels: Channels, *, per_token: bool) -> float:
    back = dequantize(quantize(rows, channels, format, per_token=per_token), channels)
    return float((back - rows).square().mean().sqrt())


@given(
    seed=st.integers(0, 2**31),
    format=_FORMATS,
    spread=st.sampled_from([1e-6, 1e-3, 1.0, 30.0, 1e4]),
    offset=st.sampled_from([0.0, 1.0, 100.0]),
    centred=st.booleans(),
    per_token=st.booleans(),
    unseen=st.sampled_from([0.0, 1.0, 3.0]),
)
def test_a_round_trip_stays_within_the_bound(
    seed: int,
    format: Format,
    spread: float,
    offset: float,
    centred: bool,
    per_token: bool,
    unseen: float,
) -> None:
    rows = _rows(seed, spread=spread, offset=offset)
    channels = _learned(rows, format, centred=centred)
    rows = rows * (1 + unseen)
    quantized = quantize(rows, channels, format, per_token=per_token)
    back = dequantize(quantized, channels)
    assert torch.isfinite(back).all()
    assert ((back - rows).abs() <= error_bound(rows, quantized, channels, format)).all()


@given(seed=st.integers(0, 2**31), format=_FORMATS, dtype=st.sampled_from(["float16", "bfloat16"]))
def test_what_was_quantized_once_is_quantized_to_the_same_codes(
    seed: int, format: Format, dtype: str
) -> None:
    """Pages that come back from a lower tier are never rounded a second time."""
    rows = _rows(seed).to(getattr(torch, dtype))
    channels = _learned(rows, format, centred=False)
    once = quantize(rows, channels, format)
    again = quantize(dequantize(once, channels), channels, format)
    # As numbers: -0 comes back as 0.
    assert torch.equal(once.codes.float(), again.codes.float())


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("value", [1e30, -1e30, 70_000.0, 449.0])
def test_values_outside_the_range_are_clamped(format: Format, value: float) -> None:
    rows = torch.full((1, 1, 4), value)
    codes = quantize(rows, Channels.neutral(1, 4), format).codes.float()
    limit = min(abs(value), format.largest)
    assert torch.isfinite(codes).all()
    assert codes.abs().max() <= format.largest
    assert torch.allclose(codes.abs(), torch.tensor(limit), rtol=2.0**-format.mantissa_bits)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_a_plain_cast_within_range_is_finite(format: Format) -> None:
    rows = torch.tensor([1e30, -1e30, 70_000.0, 449.0, 1.0]).bfloat16()
    cast = within_range(rows, format.dtype).to(format.dtype).float()
    assert torch.isfinite(cast).all()
    assert cast[0] == -cast[1] == format.largest
    assert cast[-1] == 1


def test_what_is_no_fp8_is_left_alone() -> None:
    rows = torch.tensor([1e30]).bfloat16()
    assert within_range(rows, torch.bfloat16) is rows


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_the_format_is_what_torch_casts_to(format: Format) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(format.dtype).float()
    finite = codes[torch.isfinite(codes)].unique()
    assert finite.max() == format.largest
    assert finite[finite > 0].min() == format.smallest


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_scales_are_powers_of_two_and_leave_headroom(format: Format) -> None:
    rows = _rows(7, tokens=500, spread=20.0, offset=50.0)
    channels = _learned(rows, format)
    mantissa, _ = torch.frexp(channels.scale)
    assert (mantissa == 0.5).all()
    reach = ((rows - channels.mean) / channels.scale).abs().amax(dim=0)
    assert (reach <= format.largest * HEADROOM * (1 + 1e-6)).all()
    assert (reach > format.largest * HEADROOM / 2 * (1 - 1e-6)).all()


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_the_mean_removes_the_error_of_an_offset(format: Format) -> None:
    rows = _rows(3, tokens=400, offset=30.0)
    plain = _error(rows, format, _learned(rows, format, centred=False), per_token=False)
    centred = _error(rows, format, _learned(rows, format), per_token=False)
    assert centred < plain / 5


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_the_shift_removes_what_all_channels_of_a_token_have_in_common(format: Format) -> None:
    common = torch.randn(400, 3, 1, generator=torch.Generator().manual_seed(5))
    rows = _rows(4, tokens=400) + 20 * common
    channels = _learned(rows, format)
    assert _error(rows, format, channels, per_token=True) < (
        _error(rows, format, channels, per_token=False) / 3
    )


def test_statistics_do_not_depend_on_how_the_text_is_cut() -> None:
    rows = _rows(5, tokens=100)
    cut = ChannelStatistics(3, 8)
    for piece in rows.split([1, 9, 40, 50]):
        cut.add(piece)
    whole = _learned(rows, E4M3)
    assert torch.equal(cut.channels(E4M3).scale, whole.scale)
    assert torch.allclose(cut.channels(E4M3).mean, whole.mean, atol=1e-6)


def test_a_constant_channel_comes_back_whole() -> None:
    rows = torch.full((5, 1, 2), 3.25)
    channels = _learned(rows, E4M3)
    assert torch.equal(dequantize(quantize(rows, channels, E4M3), channels), rows)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(value: float) -> None:
    rows = torch.zeros(2, 1, 2)
    rows[1, 0, 1] = value
    with pytest.raises(ValueError, match="NaN or infinity"):
        require_finite(rows, "layer 3")
    with pytest.raises(ValueError, match="NaN or infinity"):
        ChannelStatistics(1, 2).add(rows)


def test_no_text_gives_no_scales() -> None:
    with pytest.raises(ValueError, match="no token"):
        ChannelStatistics(1, 2).channels(E4M3)

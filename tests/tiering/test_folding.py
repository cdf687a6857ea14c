"""Folded attention over FP8 codes equals attention over what the codes stand for, in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.tiering.channel_statistics import ChannelStatistics
from sglang_ext.tiering.folding import Folding
from sglang_ext.tiering.quantizer import E4M3, E5M2, Channels, Format, dequantize, quantize

_HEADS, _GROUP, _DIM, _TOKENS = 2, 3, 16, 40
_SCALE = _DIM**-0.5


def _channels(rows: torch.Tensor, format: Format, *, centred: bool = True) -> Channels:
    statistics = ChannelStatistics(_HEADS, _DIM)
    statistics.add(rows)
    return statistics.channels(format, centred=centred)


def _rows(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    offset = 3 * torch.randn(_HEADS, _DIM, generator=generator)
    return torch.randn(_TOKENS, _HEADS, _DIM, generator=generator) + offset


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and natural log-sum-exp of softmax attention, float64, query heads grouped."""
    query, keys, values = (
        query.double(),
        keys.double().repeat_interleave(_GROUP, dim=1),
        values.double().repeat_interleave(_GROUP, dim=1),
    )
    logits = torch.einsum("qhd,thd->qht", query, keys) * _SCALE
    output = torch.einsum("qht,thd->qhd", logits.softmax(dim=-1), values)
    return output, logits.logsumexp(dim=-1)


@pytest.mark.parametrize("centred_values", [True, False])
@pytest.mark.parametrize("format", [E4M3, E5M2], ids=lambda format: format.name)
def test_folding_equals_dequantizing(format: Format, centred_values: bool) -> None:
    keys, values = _rows(1), _rows(2)
    query = torch.randn(5, _HEADS * _GROUP, _DIM, generator=torch.Generator().manual_seed(3))
    of_keys = _channels(keys, format)
    of_values = _channels(values, format, centred=centred_values)
    k8, v8 = quantize(keys, of_keys, format), quantize(values, of_values, format)
    expected, expected_lse = _attend(query, dequantize(k8, of_keys), dequantize(v8, of_values))

    folding = Folding(of_keys, of_values, _HEADS * _GROUP)
    folded, lse = _attend(folding.query(query), k8.codes.float(), v8.codes.float())
    output = folding.output(folded.float())

    assert torch.allclose(output.double(), expected, atol=1e-5)
    corrected = lse + folding.mean_logits(query, _SCALE)
    assert torch.allclose(corrected, expected_lse, atol=1e-5)
    assert (lse - expected_lse).abs().max() > 0.1, "the correction was not needed: a weak test"


def test_folding_a_query_in_bf16_loses_nothing() -> None:
    keys = _channels(_rows(1), E4M3)
    query = torch.randn(4, _HEADS * _GROUP, _DIM).bfloat16()
    exact = query.float() * keys.scale.repeat_interleave(_GROUP, dim=0)
    folding = Folding(keys, keys, _HEADS * _GROUP)
    assert torch.equal(folding.query(query).float(), exact)


def test_a_shift_of_v_goes_out_with_the_weights() -> None:
    values = _rows(2) + 5 * torch.randn(_TOKENS, _HEADS, 1)
    of_values = _channels(values, E4M3)
    v8 = quantize(values, of_values, E4M3, per_token=True)
    assert v8.shift is not None
    weights = torch.rand(4, _HEADS * _GROUP, _TOKENS).softmax(dim=-1)
    grouped = v8.codes.float().repeat_interleave(_GROUP, dim=1)
    shift = torch.einsum("qht,th->qh", weights, v8.shift.repeat_interleave(_GROUP, dim=1))
    whole = dequantize(v8, of_values).repeat_interleave(_GROUP, dim=1)
    folding = Folding(of_values, of_values, _HEADS * _GROUP)
    output = folding.output(torch.einsum("qht,thd->qhd", weights, grouped), shift)
    assert torch.allclose(output, torch.einsum("qht,thd->qhd", weights, whole), atol=1e-4)


def _merge(
    states: list[tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """Return the output over all keys from outputs and base-2 log-sum-exps over parts of them."""
    shares = torch.stack([lse for _, lse in states]).mul(math.log(2)).softmax(dim=0)
    outputs = torch.stack([output for output, _ in states])
    return (shares.unsqueeze(-1) * outputs).sum(dim=0)


@given(
    seed=st.integers(0, 2**31),
    format=st.sampled_from([E4M3, E5M2]),
    cached=st.integers(1, _TOKENS - 1),
    centred_values=st.booleans(),
)
def test_a_state_over_pages_merges_with_one_over_raw_rows(
    seed: int, format: Format, cached: int, centred_values: bool
) -> None:
    """The cached prefix is read as codes, the new rows as they are: one softmax over both."""
    keys, values = _rows(seed), _rows(seed + 1)
    query = torch.randn(5, _HEADS * _GROUP, _DIM, generator=torch.Generator().manual_seed(seed))
    of_keys = _channels(keys, format)
    of_values = _channels(values, format, centred=centred_values)
    k8, v8 = (
        quantize(rows[:cached], channels, format)
        for rows, channels in ((keys, of_keys), (values, of_values))
    )
    stored = [dequantize(k8, of_keys), dequantize(v8, of_values)]
    whole = [
        torch.cat([old, new[cached:]]) for old, new in zip(stored, (keys, values), strict=True)
    ]
    expected, _ = _attend(query, *whole)

    folding = Folding(of_keys, of_values, _HEADS * _GROUP)
    folded, natural = _attend(folding.query(query), k8.codes.float(), v8.codes.float())
    raw, raw_natural = _attend(query, keys[cached:], values[cached:])
    over_pages = folding.output(folded.float()).double()
    base_2 = natural / math.log(2)
    corrected = folding.log2_sum_exp(base_2, query, _SCALE)
    merged = _merge([(over_pages, corrected), (raw, raw_natural / math.log(2))])
    assert torch.allclose(merged, expected, atol=1e-4)


@pytest.mark.parametrize("query_heads", [16, 128])
def test_latent_rows_are_key_and_value_at_once(query_heads: int) -> None:
    """MLA: one head of 512 + 64 channels, of which the first 512 are the value as well."""
    rank, tail, scale = 512, 64, 192**-0.5
    generator = torch.Generator().manual_seed(5)
    latents = torch.randn(30, 1, rank + tail, generator=generator)
    latents[..., :rank] += 2 * torch.randn(1, rank, generator=generator)
    statistics = ChannelStatistics(1, rank + tail)
    statistics.add(latents)
    keys = statistics.channels(E4M3)
    values = Channels(keys.scale[:, :rank], keys.mean[:, :rank])
    codes = quantize(latents, keys, E4M3)
    whole = dequantize(codes, keys).double().squeeze(1)
    query = torch.randn(3, query_heads, rank + tail, generator=generator) / rank**0.5

    logits = torch.einsum("qhd,td->qht", query.double(), whole) * scale
    expected = torch.einsum("qht,td->qhd", logits.softmax(dim=-1), whole[:, :rank])

    folding, raw = Folding(keys, values, query_heads), codes.codes.double().squeeze(1)
    folded = torch.einsum("qhd,td->qht", folding.query(query).double(), raw) * scale
    output = torch.einsum("qht,td->qhd", folded.softmax(dim=-1), raw[:, :rank])
    assert torch.allclose(folding.output(output.float()).double(), expected, atol=1e-4)

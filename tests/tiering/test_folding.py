"""Folded attention over FP8 codes equals attention over what the codes stand for, in float64."""

import pytest
import torch

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

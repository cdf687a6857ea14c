"""Error feedback: what it keeps of the logits, against plain rounding and a naive solution."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.tiering.channel_statistics import ChannelStatistics
from sglang_ext.tiering.feedback import Feedback, QueryStatistics, learn_feedback
from sglang_ext.tiering.quantizer import FORMATS, Channels, Format, dequantize, quantize

_HEADS, _DIM = 3, 8
_FORMATS = st.sampled_from(list(FORMATS.values()))


def _queries(seed: int, rows: int = 200, *, common: float = 3.0) -> torch.Tensor:
    """Queries [rows, 2 for each KV head, dim] whose channels have much in common."""
    generator = torch.Generator().manual_seed(seed)
    own = torch.randn(rows, 2 * _HEADS, _DIM, generator=generator)
    mixed = torch.randn(rows, 2 * _HEADS, 2, generator=generator)
    return own + common * mixed @ torch.randn(2, _DIM, generator=generator)


def _keys(seed: int, tokens: int = 300) -> torch.Tensor:
    return torch.randn(tokens, _HEADS, _DIM, generator=torch.Generator().manual_seed(seed)) * 3


def _channels(queries: torch.Tensor, keys: torch.Tensor, format: Format) -> Channels:
    """Channels with feedback, as calibration finds them."""
    of_queries, of_keys = QueryStatistics(_HEADS, _DIM), ChannelStatistics(_HEADS, _DIM)
    of_queries.add(queries)
    of_keys.add(keys)
    plain = of_keys.channels(format)
    feedback = learn_feedback(of_queries.second_moment(), plain.scale, of_keys.power(plain))
    return Channels(plain.scale, plain.mean, feedback)


def _logit_error(
    queries: torch.Tensor, keys: torch.Tensor, channels: Channels, format: Format
) -> float:
    """Mean square over queries and keys of what the logits are off by."""
    away = dequantize(quantize(keys, channels, format), channels) - keys
    by_head = queries.unflatten(1, (_HEADS, 2)).transpose(0, 1).flatten(1, 2)
    return float(torch.einsum("hqd,thd->hqt", by_head, away).square().mean())


@given(seed=st.integers(0, 2**31), format=_FORMATS)
def test_logits_are_kept_better_than_by_plain_rounding(seed: int, format: Format) -> None:
    queries, keys = _queries(seed), _keys(seed + 1)
    channels = _channels(queries, keys, format)
    plain = Channels(channels.scale, channels.mean)
    with_feedback = _logit_error(queries, keys, channels, format)
    assert with_feedback < 0.7 * _logit_error(queries, keys, plain, format)


@given(seed=st.integers(0, 2**31))
def test_shares_are_the_regression_on_the_channels_still_to_come(seed: int) -> None:
    moment = _queries(seed).double()[:, 0].T @ _queries(seed).double()[:, 0]
    scale = torch.exp2(torch.arange(_DIM) % 3).unsqueeze(0)
    feedback = learn_feedback(moment.unsqueeze(0), scale, torch.ones(1, _DIM))
    order = feedback.order[0]
    weights = moment * scale[0] * scale[0].unsqueeze(-1)
    weights += 0.01 * weights.diagonal().mean() * torch.eye(_DIM)
    weights = weights[order][:, order]
    assert torch.equal(weights.diagonal(), weights.diagonal().sort(descending=True).values)
    for turn in range(_DIM):
        rest = weights[turn + 1 :, turn + 1 :]
        shares = torch.linalg.solve(rest, weights[turn + 1 :, turn]).float()
        assert torch.allclose(feedback.spread[0, turn, turn + 1 :], shares, rtol=1e-4, atol=1e-5)
        assert not feedback.spread[0, turn, : turn + 1].any()


@given(seed=st.integers(0, 2**31), format=_FORMATS)
def test_independent_channels_are_rounded_as_without(seed: int, format: Format) -> None:
    keys = _keys(seed)
    moment = torch.diag_embed(torch.rand(_HEADS, _DIM) + 0.1)
    neutral = Channels.neutral(_HEADS, _DIM)
    feedback = learn_feedback(moment, neutral.scale, torch.ones(_HEADS, _DIM))
    found = quantize(keys, Channels(neutral.scale, neutral.mean, feedback), format).codes
    assert torch.equal(found.float(), quantize(keys, neutral, format).codes.float())


@given(seed=st.integers(0, 2**31), format=_FORMATS, size=st.sampled_from([1e-20, 1.0, 1e30]))
def test_codes_are_finite_whatever_the_rows(seed: int, format: Format, size: float) -> None:
    channels = _channels(_queries(seed), _keys(seed), format)
    assert torch.isfinite(quantize(_keys(seed) * size, channels, format).codes.float()).all()


def test_a_head_that_nobody_asks_is_rounded_plainly() -> None:
    feedback = learn_feedback(torch.zeros(1, _DIM, _DIM), torch.ones(1, _DIM), torch.ones(1, _DIM))
    assert not feedback.spread.any()


def test_statistics_do_not_depend_on_how_the_text_is_cut() -> None:
    queries = _queries(5)
    whole, cut = QueryStatistics(_HEADS, _DIM), QueryStatistics(_HEADS, _DIM)
    whole.add(queries)
    for piece in queries.split([1, 9, 90, 100]):
        cut.add(piece)
    assert torch.allclose(cut.second_moment(), whole.second_moment(), rtol=1e-5)


def test_power_is_the_mean_square_of_the_normalised_rows() -> None:
    statistics, keys = ChannelStatistics(_HEADS, _DIM), _keys(3) + 5
    for piece in keys.split(70):
        statistics.add(piece)
    channels = Channels(torch.full((_HEADS, _DIM), 0.5), torch.randn(_HEADS, _DIM))
    expected = ((keys - channels.mean) / channels.scale).square().mean(dim=0)
    assert torch.allclose(statistics.power(channels).float(), expected, rtol=1e-4)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_a_share_of_the_heads_is_rounded_like_the_whole(format: Format) -> None:
    """Ranks hold some heads each; together they must write what one would."""
    keys = _keys(9)
    channels = _channels(_queries(9), keys, format)
    whole = quantize(keys, channels, format).codes.float()
    for head in range(_HEADS):
        part = slice(head, head + 1)
        found = quantize(keys[:, part], channels.heads(part), format).codes.float()
        assert torch.equal(found, whole[:, part])
    assert isinstance(channels.heads(slice(0, 1)).feedback, Feedback)

"""Attention over calibrated FP8 pages, prefill and decode, against float32 over the same rows."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sglang_ext.patches.cpu_attention_kernel import load_decode_kernel, load_extend_kernel
from sglang_ext.patches.cpu_attention_meta import Reach, Step
from sglang_ext.patches.cpu_attention_ops import Scoring
from sglang_ext.patches.cpu_fp8_pages import Fp8Layer
from sglang_ext.tiering.feedback import learn_feedback
from sglang_ext.tiering.quantizer import FORMATS, Channels, Format, Quantized, dequantize
from sglang_ext.tiering.scales import LayerChannels

_HEADS, _KV_HEADS, _DIM, _TOKENS, _SLOTS = 6, 2, 64, 90, 256
_SCORING = Scoring(_DIM**-0.5)


def _channels(seed: int) -> Channels:
    """Scales and means far from neutral: whoever forgets to fold one is far off."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-5, -1, (_KV_HEADS, _DIM), generator=generator)
    mean = torch.randn(_KV_HEADS, _DIM, generator=generator)
    return Channels(torch.exp2(exponents.float()), mean)


def _with_feedback(channels: Channels) -> Channels:
    queries = torch.randn(_KV_HEADS, 3 * _DIM, _DIM, generator=torch.Generator().manual_seed(7))
    queries[..., 1:] += 2 * queries[..., :-1]
    power = torch.ones(_KV_HEADS, _DIM)
    feedback = learn_feedback(queries.transpose(1, 2) @ queries, channels.scale, power)
    return Channels(channels.scale, channels.mean, feedback)


class _Case:
    """One request whose rows lie in scattered slots of FP8 buffers."""

    def __init__(self, format: Format, *, feedback: bool) -> None:
        keys = _with_feedback(_channels(1)) if feedback else _channels(1)
        channels = LayerChannels(keys, _channels(2))
        self.layer = Fp8Layer(channels, format, _HEADS)
        generator = torch.Generator().manual_seed(3)
        self.query, self.rows_k, self.rows_v = (
            torch.randn(_TOKENS, heads, _DIM, generator=generator).bfloat16()
            for heads in (_HEADS, _KV_HEADS, _KV_HEADS)
        )
        codes = self.layer.codes(self.rows_k, self.rows_v)
        self.slots = torch.randperm(_SLOTS, generator=generator)[:_TOKENS]
        self.pages = []
        for each in codes:
            buffer = torch.zeros(_SLOTS, _KV_HEADS, _DIM).to(format.dtype)
            buffer.view(torch.uint8)[self.slots] = each.view(torch.uint8)
            self.pages.append(buffer)
        self.stored = [
            dequantize(Quantized(each, None), of)
            for each, of in zip(codes, (channels.keys, channels.values), strict=True)
        ]

    def step(self, cached: list[int] | None) -> Step:
        lines = self.slots.int().unsqueeze(0)
        return Step(lines, torch.zeros(1, dtype=torch.int64), [_TOKENS], cached, torch.bfloat16)

    def expected(self) -> torch.Tensor:
        """Float32 attention over what is stored, [tokens, heads, dim]."""
        q, k, v = (x.float().transpose(0, 1) for x in (self.query, *self.stored))
        found = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return found.transpose(0, 1)


def _close(found: torch.Tensor, expected: torch.Tensor) -> None:
    # Queries, weights and outputs are rounded to bfloat16.
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.trial(91)
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_prefill_and_decode_read_scales_and_means(format: Format, feedback: bool) -> None:
    extend, decode = load_extend_kernel(), load_decode_kernel()
    if extend is None or decode is None:
        pytest.skip("no AVX-512, no products of bfloat16 or no compiler here")
    case = _Case(format, feedback=feedback)
    expected, reach = case.expected(), Reach(-1, False)
    query = case.layer.query(case.query)
    for cached in (0, 40):
        plan = case.step([cached]).extend(reach)
        found = extend.attend(query[cached:], *case.pages, plan, _SCORING)
        _close(case.layer.output(found), expected[cached:])
    last = decode.attend(query[-1:], *case.pages, case.step(None).ragged(reach), _SCORING)
    _close(case.layer.output(last.bfloat16()), expected[-1:])


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_what_is_stored_is_near_what_was_given(format: Format) -> None:
    """A mean folded twice, or a scale inverted, would be far off."""
    case = _Case(format, feedback=False)
    half_step = 2.0 ** -(format.mantissa_bits + 1)
    for stored, rows in zip(case.stored, (case.rows_k, case.rows_v), strict=True):
        away = (stored - rows.float()).norm() / rows.float().norm()
        assert away < 2 * half_step

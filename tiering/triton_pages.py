"""FP8 pages on a GPU in Triton: a writer with error feedback, and a reader that knows token shifts.

``write_codes`` is ``quantizer.quantize`` for channels with feedback, which plain torch can only do
with some operators a channel. ``attend_pages`` is decode attention over pages, by heads or latent,
in both formats, with the optional shift of each token: FlashInfer's kernels know no shift, and no
latent E5M2. It does not divide a long request, so it is for checks and large batches.

Tested under Triton's interpreter. Not yet run on a GPU.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_ext.tiering.page_plan import PagePlan
from sglang_ext.tiering.quantizer import Channels, Format

__all__ = ["Shifts", "attend_pages", "write_codes"]

_TOKENS = 16
"""Tokens that one program writes."""
_KEYS = 64
"""Keys that one program reads at a time."""
_ROWS = 16
"""Query heads of one program: the fewest rows that a matrix product on a GPU takes."""
_INTERPRETED = triton.knobs.runtime.interpret


class Shifts(NamedTuple):
    """The shift of every token and head: ``b`` of K and ``c`` of V, float32 [slots, KV heads]."""

    keys: torch.Tensor
    values: torch.Tensor


def write_codes(rows: torch.Tensor, channels: Channels, format: Format) -> torch.Tensor:
    """Return the codes, FP8 [tokens, heads, dim], of rows of that shape; no shift of tokens.

    ``rows``: any floating dtype, each token's heads without gaps, as are the channels' tensors.
    """
    tokens, heads, dim = rows.shape
    codes = torch.empty(rows.shape, dtype=format.dtype, device=rows.device)
    feedback = channels.feedback
    if tokens == 0:
        return codes
    _write[(triton.cdiv(tokens, _TOKENS), heads)](
        rows,
        codes,
        channels.scale.reciprocal(),
        channels.mean,
        rows if feedback is None else feedback.order,
        rows if feedback is None else feedback.spread,
        tokens,
        rows.stride(0),
        heads=heads,
        dim=dim,
        lanes=triton.next_power_of_2(dim),
        block=_TOKENS,
        mantissa=format.mantissa_bits,
        lowest=round(math.log2(format.smallest)) + format.mantissa_bits,
        largest=format.largest,
        feedback=feedback is not None,
    )
    return codes


def attend_pages(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: PagePlan,
    page_size: int,
    softmax_scale: float,
    shifts: Shifts | None = None,
) -> torch.Tensor:
    """Attend one row a request: query [requests, query heads, dim] over pools of codes.

    ``keys`` [slots, KV heads, dim], ``values`` [slots, KV heads, value dim], a power of two; latent
    values are the first columns of the keys, the rest of which is a power of two too. The query is
    folded (``Folding.query``), and so is what comes back, the query's dtype [requests, query heads,
    value dim]: a shift of V is in it already.
    """
    requests, heads, dim = query.shape
    kv_heads, width = values.shape[1:]
    output = query.new_empty(requests, heads, width)
    starts, lengths = (part.to(query.device) for part in (plan.indptr, plan.lengths))
    _attend[(requests, kv_heads, triton.cdiv(heads // kv_heads, _ROWS))](
        query,
        keys,
        values,
        query if shifts is None else shifts.keys,
        query if shifts is None else shifts.values,
        output,
        starts,
        plan.indices,
        lengths,
        softmax_scale * math.log2(math.e),
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        kv_heads=kv_heads,
        group=heads // kv_heads,
        rows=_ROWS,
        dim=dim,
        width=width,
        tail=dim - width,
        block=_KEYS,
        page_size=page_size,
        shifted=shifts is not None,
        # The interpreter multiplies the bits of bfloat16 as integers.
        exact=_INTERPRETED,
    )
    return output


@triton.jit
def _rounded(x, mantissa: tl.constexpr, lowest: tl.constexpr, largest: tl.constexpr):
    """The nearest number of the format, ties to even; a cast alone is wrong in the interpreter."""
    x = tl.minimum(tl.maximum(x, -largest), largest)
    bits = x.to(tl.int32, bitcast=True)
    exponent = tl.maximum(((bits >> 23) & 0xFF) - 127, lowest)
    step = ((exponent - mantissa + 127) << 23).to(tl.float32, bitcast=True)
    # Adding and taking off 1.5 * 2^23 leaves a float32 no fraction.
    return ((x / step + 12582912.0) - 12582912.0) * step


@triton.jit
def _write(
    rows,
    codes,
    inverse,
    mean,
    order,
    spread,
    tokens,
    stride,
    heads: tl.constexpr,
    dim: tl.constexpr,
    lanes: tl.constexpr,
    block: tl.constexpr,
    mantissa: tl.constexpr,
    lowest: tl.constexpr,
    largest: tl.constexpr,
    feedback: tl.constexpr,
):
    head = tl.program_id(1)
    token = (tl.program_id(0) * block + tl.arange(0, block)).to(tl.int64)
    turn = tl.arange(0, lanes)
    real = turn < dim
    channel = turn
    if feedback:
        channel = tl.load(order + head * dim + turn, mask=real, other=0).to(tl.int32)
    here = (token < tokens)[:, None] & real[None, :]
    place = token[:, None] * stride + head * dim + channel[None, :]
    normal = tl.load(rows + place, mask=here, other=0.0).to(tl.float32)
    normal -= tl.load(mean + head * dim + channel, mask=real, other=0.0)[None, :]
    normal *= tl.load(inverse + head * dim + channel, mask=real, other=0.0)[None, :]
    if feedback:
        for i in range(dim):
            now = (turn == i)[None, :]
            wanted = tl.sum(tl.where(now, normal, 0.0), 1)
            done = _rounded(wanted, mantissa, lowest, largest)
            share = tl.load(spread + (head * dim + i) * dim + turn, mask=real, other=0.0)
            normal += (wanted - done)[:, None] * share[None, :]
            normal = tl.where(now, done[:, None], normal)
    else:
        normal = _rounded(normal, mantissa, lowest, largest)
    target = token[:, None] * (heads * dim) + head * dim + channel[None, :]
    tl.store(codes + target, normal.to(codes.dtype.element_ty), mask=here)


@triton.jit
def _attend(
    query,
    keys,
    values,
    key_shift,
    value_shift,
    output,
    starts,
    pages,
    lengths,
    scale,
    key_stride,
    key_head,
    value_stride,
    value_head,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    rows: tl.constexpr,
    dim: tl.constexpr,
    width: tl.constexpr,
    tail: tl.constexpr,
    block: tl.constexpr,
    page_size: tl.constexpr,
    shifted: tl.constexpr,
    exact: tl.constexpr,
):
    request, head = tl.program_id(0), tl.program_id(1)
    kind: tl.constexpr = tl.float32 if exact else tl.bfloat16
    row, column = tl.program_id(2) * rows + tl.arange(0, rows), tl.arange(0, width)
    # Where there is no tail, it is the first columns again, times zero.
    rest = (width if tail else 0) + tl.arange(0, tail if tail else 16)
    real = (row < group)[:, None]
    first = (request * kv_heads + head) * group
    places = query + (first + row)[:, None] * dim
    q = tl.load(places + column[None, :], mask=real, other=0.0).to(kind)
    q_rest = tl.load(places + rest[None, :], mask=real & (tail > 0), other=0.0).to(kind)
    q_sum = tl.sum(q.to(tl.float32), 1) + tl.sum(q_rest.to(tl.float32), 1)
    length, start = tl.load(lengths + request), tl.load(starts + request)
    highest = tl.full([rows], -float("inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    found = tl.zeros([rows, width], tl.float32)
    for begin in range(0, length, block):
        at = begin + tl.arange(0, block)
        seen = at < length
        page = tl.load(pages + start + at // page_size, mask=seen, other=0).to(tl.int64)
        slot = page * page_size + at % page_size
        k_row = keys + slot[:, None] * key_stride + head * key_head
        logits = _products(q, k_row + column[None, :], kind)
        if tail > 0:
            logits += _products(q_rest, k_row + rest[None, :], kind)
        if shifted:
            logits += tl.load(key_shift + slot * kv_heads + head)[None, :] * q_sum[:, None]
        logits = tl.where(seen[None, :], logits * scale, -float("inf"))
        higher = tl.maximum(highest, tl.max(logits, 1))
        weights, fade = tl.exp2(logits - higher[:, None]), tl.exp2(highest - higher)
        v_row = values + slot[:, None] * value_stride + head * value_head
        v = tl.load(v_row + column[None, :], mask=seen[:, None], other=0.0).to(kind)
        found = found * fade[:, None] + tl.dot(weights.to(kind), v, input_precision="ieee")
        if shifted:
            moved = tl.load(value_shift + slot * kv_heads + head)
            found += tl.sum(weights * moved[None, :], 1)[:, None]
        total = total * fade + tl.sum(weights, 1)
        highest = higher
    target = output + (first + row)[:, None] * width + column[None, :]
    tl.store(target, (found / total[:, None]).to(output.dtype.element_ty), mask=real)


@triton.jit
def _products(q, places, kind: tl.constexpr):
    """Query rows times the keys at ``places``, float32."""
    return tl.dot(q, tl.trans(tl.load(places).to(kind)), input_precision="ieee")

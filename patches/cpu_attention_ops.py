"""Attention over gathered pages in plain torch: the arithmetic of the CPU backend.

Shapes: a batch of ``n`` requests, ``heads`` query heads folded onto ``kv_heads``, ``keys`` keys.
Keys and values are gathered head by head into contiguous rows, because matrix products over them
then run two to three times faster than over a transposed view.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch.nn.functional import scaled_dot_product_attention

from sglang_ext.patches.cpu_attention_meta import (
    QUERY_BLOCK,
    DecodeGroup,
    ExtendPlan,
    ExtendRun,
    Slots,
)

__all__ = ["Scoring", "apply_scale", "attend_decode", "attend_extend", "gather", "is_fp8"]

_SCORED_BLOCK = 64
"""Query rows at once where the scores are written out in float32 instead of fused."""


@dataclass(frozen=True)
class Scoring:
    """How a score becomes a logit: times ``scale``, then tanh-capped at ``soft_cap`` (0: not)."""

    scale: float
    soft_cap: float = 0.0


def is_fp8(dtype: torch.dtype) -> bool:
    """Whether pages of this type must be widened before torch can compute with them."""
    return dtype in (torch.float8_e4m3fn, torch.float8_e5m2)


@cache
def _widened(source: torch.dtype, target: torch.dtype) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(source).to(target)


def gather(buffer: torch.Tensor, slots: Slots, dtype: torch.dtype) -> torch.Tensor:
    """Copy the keys (or values) in ``slots`` out of a pool buffer ``[slots, heads, width]``.

    Returns ``[..., heads, keys, width]`` in ``dtype``, contiguous. FP8 pages are widened through a
    table of 256 values, which is several times faster than torch's own cast.
    """
    _, heads, width = buffer.shape
    rows = slots.rows(heads)
    flat = buffer.view(-1, width)
    if is_fp8(buffer.dtype):
        codes = flat.view(torch.uint8).index_select(0, rows.flatten())
        found = _widened(buffer.dtype, dtype).index_select(0, codes.flatten().int())
    else:
        found = flat.index_select(0, rows.flatten()).to(dtype)
    return found.view(*rows.shape, width)


def apply_scale(heads: torch.Tensor, scale: torch.Tensor | float | None) -> torch.Tensor:
    """Multiply ``[rows, heads, width]`` by one scale, or by one for each KV head and channel.

    Folding the scale of FP8 keys into the query, and that of values into the output, spares a pass
    over every gathered page.
    """
    if scale is None:
        return heads
    factor = torch.as_tensor(scale, dtype=torch.float32)
    if factor.dim() == 2:
        factor = factor.repeat_interleave(heads.shape[1] // factor.shape[0], dim=0)
    return (heads.float() * factor).to(heads.dtype)


def attend_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    group: DecodeGroup,
    scoring: Scoring,
) -> torch.Tensor:
    """Attend one new token a request: ``[n, heads, width]`` over ``[n, kv_heads, keys, width]``.

    The query heads that share a KV head become the rows of one matrix, so that every key is read
    once. Returns ``[n, heads, value_width]``.
    """
    n, heads, width = query.shape
    pairs, count = n * keys.shape[1], keys.shape[2]
    folded = query.reshape(pairs, -1, width)
    scores = torch.bmm(folded, keys.flatten(0, 1).transpose(1, 2)).view(n, heads, count)
    weights = _weights(scores, group.bias, scoring).to(values.dtype)
    return torch.bmm(weights.view(pairs, -1, count), values.flatten(0, 1)).view(n, heads, -1)


def attend_extend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    run: ExtendRun,
    plan: ExtendPlan,
    scoring: Scoring,
) -> torch.Tensor:
    """Attend one request's new rows: ``[rows, heads, width]`` over ``[kv_heads, keys, ...]``.

    Only new rows are computed, in blocks, each over the keys up to its own last row. Returns
    ``[rows, heads, value_width]``.
    """
    by_head = query.transpose(0, 1)
    fused = scoring.soft_cap == 0.0 and keys.shape[-1] == values.shape[-1]
    if fused and run.plain:
        return _fused(by_head, keys, values, None, scoring).transpose(0, 1)
    block = QUERY_BLOCK if fused else _SCORED_BLOCK
    attend = _fused if fused else _scored
    done = []
    for begin in range(0, query.shape[0], block):
        rows = by_head[:, begin : begin + block]
        first, last, mask = _block_keys(begin, rows.shape[1], run, plan)
        done.append(attend(rows, keys[:, first:last], values[:, first:last], mask, scoring))
    return torch.cat(done, dim=1).transpose(0, 1)


def _block_keys(
    begin: int, rows: int, run: ExtendRun, plan: ExtendPlan
) -> tuple[int, int, torch.Tensor]:
    """Return the keys ``[first, last)`` of a block of rows, and its mask over them."""
    position = run.before + begin
    first = 0 if plan.window < 0 else max(0, position - plan.window)
    return first, position + rows, plan.band.block(position, rows, first)


def _fused(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scoring: Scoring,
) -> torch.Tensor:
    """Attend ``[heads, rows, width]`` without writing the scores out; no mask means causal."""
    return scaled_dot_product_attention(
        query.unsqueeze(0),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        attn_mask=None if mask is None else mask.to(query.dtype),
        is_causal=mask is None,
        scale=scoring.scale,
        enable_gqa=query.shape[0] != keys.shape[0],
    ).squeeze(0)


def _scored(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scoring: Scoring,
) -> torch.Tensor:
    """Attend ``[heads, rows, width]`` with the scores in hand, for what the fused one cannot do."""
    heads, rows, width = query.shape
    kv_heads, count, _ = keys.shape
    folded = query.reshape(kv_heads, -1, width)
    scores = torch.bmm(folded, keys.transpose(1, 2)).view(heads, rows, count)
    weights = _weights(scores, mask, scoring).to(values.dtype)
    return torch.bmm(weights.view(kv_heads, -1, count), values).view(heads, rows, -1)


def _weights(scores: torch.Tensor, bias: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Turn raw scores into float32 weights that sum to one; ``bias`` is -inf on unseen keys."""
    logits = scores.float().mul_(scoring.scale)
    if scoring.soft_cap:
        logits.div_(scoring.soft_cap).tanh_().mul_(scoring.soft_cap)
    return torch.softmax(logits.add_(bias), dim=-1)

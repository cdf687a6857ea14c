"""Attention over FP8 pages with unmodified kernels: what to do before and after the call.

With ``K = s_k (k8 + b) + mu_k`` and ``V = s_v (v8 + c) + mu_v`` (``quantizer.py``), for query q:

    q . K[t] = (q s_k) . k8[t] + b[t] sum(q s_k) + q . mu_k
    sum_t p[t] V[t] = s_v (sum_t p[t] v8[t] + sum_t p[t] c[t]) + mu_v          since sum p = 1

so the kernel gets ``q s_k`` and the raw codes. ``q . mu_k`` is the same for every t: softmax drops
it, but the log-sum-exp does not, and neither does a soft cap or a sink. Query heads are grouped:
head i reads KV head ``i // (query heads / KV heads)``.
"""

import torch

from sglang_ext.tiering.quantizer import Channels

__all__ = ["folded_query", "mean_logits", "unfolded_output"]


def folded_query(query: torch.Tensor, keys: Channels) -> torch.Tensor:
    """Return ``q s_k`` for query [tokens, query heads, dim], in its dtype; exact in bf16."""
    return query * _grouped(keys.scale, query).to(query.dtype)


def mean_logits(query: torch.Tensor, keys: Channels, softmax_scale: float) -> torch.Tensor:
    """Return ``softmax_scale * q . mu_k``, float32 [tokens, query heads].

    Natural units. Add it to the log-sum-exp (times log2(e) where that is base 2) before merging
    with a state over unshifted keys, and to the logits where a soft cap or a sink sees them.
    """
    return (query.float() * _grouped(keys.mean, query)).sum(dim=-1) * softmax_scale


def unfolded_output(
    output: torch.Tensor, values: Channels, shift: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the attention output [tokens, query heads, dim] over V from that over its codes.

    ``shift`` is ``sum_t p[t] c[t]``, float32 [tokens, query heads], where V has per-token shifts.
    """
    normal = output.float()
    if shift is not None:
        normal = normal + shift.unsqueeze(-1)
    unfolded = normal * _grouped(values.scale, output) + _grouped(values.mean, output)
    return unfolded.to(output.dtype)


def _grouped(channels: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``channels`` [KV heads, dim] once for each of the rows' query heads."""
    return channels.repeat_interleave(rows.shape[-2] // channels.shape[0], dim=0)

"""Attention over FP8 pages with unmodified kernels: what to do before and after the call.

With ``K = s_k (k8 + b) + mu_k`` and ``V = s_v (v8 + c) + mu_v`` (``quantizer.py``), for query q:

    q . K[t] = (q s_k) . k8[t] + b[t] sum(q s_k) + q . mu_k
    sum_t p[t] V[t] = s_v (sum_t p[t] v8[t] + sum_t p[t] c[t]) + mu_v          since sum p = 1

so the kernel gets ``q s_k`` and the raw codes. ``q . mu_k`` is the same for every t: softmax drops
it, but the log-sum-exp does not, and neither does a soft cap or a sink. Query heads are grouped:
head i reads KV head ``i // (query heads / KV heads)``.
"""

import math

import torch

from sglang_ext.tiering.quantizer import Channels

__all__ = ["Folding"]


class Folding:
    """One layer's channels, laid out for ``query_heads`` heads of queries and outputs."""

    def __init__(self, keys: Channels, values: Channels, query_heads: int) -> None:
        group = query_heads // keys.scale.shape[0]
        self._key_scale, self._key_mean, self._value_scale, self._value_mean = (
            channels.repeat_interleave(group, dim=0)
            for channels in (keys.scale, keys.mean, values.scale, values.mean)
        )
        self._centred_values = bool(values.mean.any())

    def query(self, query: torch.Tensor) -> torch.Tensor:
        """Return ``q s_k`` for query [tokens, query heads, dim], in its dtype; exact in bf16."""
        return query * self._key_scale.to(query.dtype)

    def mean_logits(self, query: torch.Tensor, softmax_scale: float) -> torch.Tensor:
        """Return ``softmax_scale * q . mu_k``, float32 [tokens, query heads].

        Natural units. Softmax drops it; a log-sum-exp that is merged with that of other keys, and
        logits that a soft cap or a sink sees, need it.
        """
        return (query.float() * self._key_mean).sum(dim=-1) * softmax_scale

    def log2_sum_exp(
        self, found: torch.Tensor, query: torch.Tensor, softmax_scale: float
    ) -> torch.Tensor:
        """Return the log-sum-exp over the keys from that over their codes.

        ``found`` and the result: base 2, as FlashInfer has it, float32 [tokens, query heads].
        ``query`` is the one before ``query()``.
        """
        return found + self.mean_logits(query, softmax_scale) * math.log2(math.e)

    def output(self, output: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
        """Return the attention output [tokens, query heads, dim] over V from that over its codes.

        ``shift`` is ``sum_t p[t] c[t]``, float32 [tokens, query heads], where V has token shifts.
        """
        if shift is None and not self._centred_values:
            return output * self._value_scale.to(output.dtype)
        normal = output.float()
        if shift is not None:
            normal = normal + shift.unsqueeze(-1)
        return torch.addcmul(self._value_mean, normal, self._value_scale).to(output.dtype)

"""The attention backend itself: SGLang's batches and pools in, the arithmetic of ``_ops`` out.

One instance lives in each model runner. It is chosen by ``--attention-backend sglang_ext_cpu``, and
by default on our CPU platform.
"""

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sglang_ext.patches.attention_limits import refuse_cross_attention, refuse_layer
from sglang_ext.patches.cpu_attention import CPU_ATTENTION
from sglang_ext.patches.cpu_attention_kernel import load_decode_kernel, load_extend_kernel
from sglang_ext.patches.cpu_attention_meta import Reach, Slots, Step
from sglang_ext.patches.cpu_attention_ops import (
    Scoring,
    apply_scale,
    attend_decode,
    attend_extend,
    gather,
    is_fp8,
)
from sglang_ext.patches.cpu_fp8_pages import fp8_layers
from sglang_ext.tiering.quantizer import within_range

__all__ = ["CpuAttentionBackend"]

_NAMES = (CPU_ATTENTION, "torch_native")
"""This backend, and the one to take instead of it."""


class CpuAttentionBackend(AttentionBackend):
    """Attention on a CPU that computes new rows only and decodes the whole batch at once."""

    forward_metadata: Step | None

    def __init__(self, runner: Any) -> None:
        refuse_cross_attention(*_NAMES, runner.model_config)
        # SGLang's models look these three up here, by these names.
        self.device = runner.device
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self._dtype = runner.dtype
        # A latent page holds one row that is both the key and, but for its tail, the value.
        self._latent = bool(runner.use_mla_backend)
        self._sliding = (
            isinstance(self.token_to_kv_pool, SWAKVPool)
            and self.token_to_kv_pool.swa_layer_nums > 0
        )
        self._sliding_loc: torch.Tensor | None = None
        self._decode_kernel = load_decode_kernel()
        self._extend_kernel = load_extend_kernel()
        self._fp8_layers = fp8_layers(runner)
        self.forward_metadata = None

    def support_triton(self) -> bool:
        """Tell SGLang to take its torch code, not its Triton kernels."""
        return False

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Note the requests of this step; what each kind of layer reads is laid out on demand."""
        translate = self.token_to_kv_pool.translate_loc_from_full_to_swa if self._sliding else None
        self._sliding_loc = None
        if translate is not None and forward_batch.out_cache_loc is not None:
            self._sliding_loc = translate(forward_batch.out_cache_loc)
        extends = not forward_batch.forward_mode.is_decode_or_idle()
        self.forward_metadata = Step(
            self.req_to_token_pool.req_to_token,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens.tolist(),
            forward_batch.extend_prefix_lens.tolist() if extends else None,
            self._dtype,
            translate,
        )

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> torch.Tensor:
        """Attend the new rows of every request; returns ``[rows, heads * value_width]``."""
        query = self._start(q, k, v, layer, forward_batch, save_kv_cache, options)
        return self._finish(self._extend(query, layer), layer)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> torch.Tensor:
        """Attend one new token of every request; returns ``[batch, heads * value_width]``."""
        query = self._start(q, k, v, layer, forward_batch, save_kv_cache, options)
        return self._finish(self._decode(query, layer), layer)

    def _extend(self, query: torch.Tensor, layer: RadixAttention) -> torch.Tensor:
        """Attend by the kernel, or request by request in plain torch."""
        keys, values = self._pages(layer)
        plan, scoring = self._step().extend(self._reach(layer)), _scoring(layer)
        kernel = self._extend_kernel
        if kernel is not None and kernel.takes(query, keys, layer.v_head_dim):
            return kernel.attend(query, keys, values, plan, scoring)
        output = _room(query, layer)
        for run in plan.runs:
            read = self._gathered(keys, values, run.slots)
            rows = query[run.begin : run.end]
            attended = attend_extend(rows, *read, run, plan, scoring)
            output[run.begin : run.end] = attended[..., : layer.v_head_dim]
        return output

    def _decode(self, query: torch.Tensor, layer: RadixAttention) -> torch.Tensor:
        """Attend by the kernel, or requests of like length together in plain torch."""
        keys, values = self._pages(layer)
        step, reach, scoring = self._step(), self._reach(layer), _scoring(layer)
        kernel = self._decode_kernel
        if kernel is not None and kernel.takes(query, keys, layer.v_head_dim):
            return kernel.attend(query, keys, values, step.ragged(reach), scoring).to(query.dtype)
        output = _room(query, layer)
        for group in step.decode(reach):
            read = self._gathered(keys, values, group.slots)
            attended = attend_decode(query[group.requests], *read, group, scoring)
            output[group.requests] = attended[..., : layer.v_head_dim]
        return output

    def _start(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Store the new pages, then return the query by head."""
        refuse_layer(*_NAMES, layer, options)
        if save_kv_cache and k is not None and v is not None:
            self._store(k, v, layer, forward_batch)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if (calibrated := self._fp8_layers.get(layer.layer_id)) is not None:
            return calibrated.query(query)
        return apply_scale(query, self._scale(layer, layer.k_scale))

    def _finish(self, output: torch.Tensor, layer: RadixAttention) -> torch.Tensor:
        if (calibrated := self._fp8_layers.get(layer.layer_id)) is not None:
            return calibrated.output(output).flatten(1)
        return apply_scale(output, self._scale(layer, layer.v_scale)).flatten(1)

    def _store(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
    ) -> None:
        loc = KVWriteLoc.for_batch(forward_batch, swa_loc=self._sliding_loc)
        if (calibrated := self._fp8_layers.get(layer.layer_id)) is not None:
            keys = k.reshape(-1, layer.tp_k_head_num, layer.qk_head_dim)
            values = v.reshape(-1, layer.tp_v_head_num, layer.v_head_dim)
            self.token_to_kv_pool.set_kv_buffer(layer, loc, *calibrated.codes(keys, values))
        elif self._scaled(layer):
            self.token_to_kv_pool.set_kv_buffer(layer, loc, k, v, layer.k_scale, layer.v_scale)
        else:
            dtype = self.token_to_kv_pool.dtype
            rows = within_range(k, dtype), within_range(v, dtype)
            self.token_to_kv_pool.set_kv_buffer(layer, loc, *rows)

    def _pages(self, layer: RadixAttention) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the buffers of keys and values, once a tier has brought the layer's pages back.

        Latent pages serve as both.
        """
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        if self._latent:
            return keys, keys[..., : layer.v_head_dim]
        return keys, self.token_to_kv_pool.get_value_buffer(layer.layer_id)

    def _gathered(
        self, keys: torch.Tensor, values: torch.Tensor, slots: Slots
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the keys and values in ``slots``; latent pages are copied once, and used whole."""
        found = gather(keys, slots, self._dtype)
        return found, found if self._latent else gather(values, slots, self._dtype)

    def _reach(self, layer: RadixAttention) -> Reach:
        in_sliding_pool = self._sliding and self.token_to_kv_pool.layers_mapping[layer.layer_id][1]
        return Reach(layer.sliding_window_size, in_sliding_pool)

    def _scaled(self, layer: RadixAttention) -> bool:
        """Whether this layer's pages are stored divided by its scales: FP8 keys and values are."""
        given = layer.k_scale is not None or layer.v_scale is not None
        return given and not self._latent and is_fp8(self.token_to_kv_pool.dtype)

    def _scale(self, layer: RadixAttention, scale: torch.Tensor | None) -> torch.Tensor | None:
        return scale if self._scaled(layer) else None

    def _step(self) -> Step:
        assert self.forward_metadata is not None, "a layer ran before init_forward_metadata"
        return self.forward_metadata


def _room(query: torch.Tensor, layer: RadixAttention) -> torch.Tensor:
    """Return an empty output by head."""
    return query.new_empty(query.shape[0], layer.tp_q_head_num, layer.v_head_dim)


def _scoring(layer: RadixAttention) -> Scoring:
    return Scoring(scale=layer.scaling, soft_cap=layer.logit_cap or 0.0)

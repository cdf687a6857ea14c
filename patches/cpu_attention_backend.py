"""The attention backend itself: SGLang's batches and pools in, the arithmetic of ``_ops`` out.

One instance lives in each model runner. It is chosen by ``--attention-backend sglang_ext_cpu``, and
by default on our CPU platform.
"""

from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sglang_ext.errors import UnsupportedError
from sglang_ext.patches.cpu_attention_kernel import DecodeKernel, load_kernel
from sglang_ext.patches.cpu_attention_meta import Reach, Slots, Step
from sglang_ext.patches.cpu_attention_ops import (
    Scoring,
    apply_scale,
    attend_decode,
    attend_extend,
    gather,
    is_fp8,
)

__all__ = ["CpuAttentionBackend"]


class CpuAttentionBackend(AttentionBackend):
    """Attention on a CPU that computes new rows only and decodes the whole batch at once."""

    forward_metadata: Step | None

    def __init__(self, runner: Any) -> None:
        _refuse_model(runner)
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
        self._kernel = load_kernel()
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
        query, output = self._start(q, k, v, layer, forward_batch, save_kv_cache, options)
        plan = self._step().extend(self._reach(layer))
        scoring = _scoring(layer)
        reads = self._reads(layer, [run.slots for run in plan.runs])
        for run, (keys, values) in zip(plan.runs, reads, strict=True):
            rows = query[run.begin : run.end]
            attended = attend_extend(rows, keys, values, run, plan, scoring)
            output[run.begin : run.end] = attended[..., : layer.v_head_dim]
        return self._finish(output, layer)

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
        query, output = self._start(q, k, v, layer, forward_batch, save_kv_cache, options)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        if self._kernel is not None and self._kernel.takes(keys, layer.v_head_dim):
            self._walk(self._kernel, query, keys, layer, output)
        else:
            self._gather_and_attend(query, layer, output)
        return self._finish(output, layer)

    def _walk(
        self,
        kernel: DecodeKernel,
        query: torch.Tensor,
        keys: torch.Tensor,
        layer: RadixAttention,
        output: torch.Tensor,
    ) -> None:
        """Decode by the kernel, which reads pages where they lie."""
        latent = keys[..., : layer.v_head_dim]
        values = latent if self._latent else self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        slots = self._step().ragged(self._reach(layer))
        output.copy_(kernel.attend(query, keys, values, slots, _scoring(layer)))

    def _gather_and_attend(
        self, query: torch.Tensor, layer: RadixAttention, output: torch.Tensor
    ) -> None:
        """Decode in plain torch, requests of like length together."""
        groups = self._step().decode(self._reach(layer))
        reads = self._reads(layer, [group.slots for group in groups])
        for group, (keys, values) in zip(groups, reads, strict=True):
            rows = query[group.requests]
            attended = attend_decode(rows, keys, values, group, _scoring(layer))
            output[group.requests] = attended[..., : layer.v_head_dim]

    def _start(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
        options: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new pages, then return the query and an empty output, both by head."""
        _refuse_layer(layer, options)
        if save_kv_cache and k is not None and v is not None:
            self._store(k, v, layer, forward_batch)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        output = query.new_empty(query.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        return apply_scale(query, self._scale(layer, layer.k_scale)), output

    def _finish(self, output: torch.Tensor, layer: RadixAttention) -> torch.Tensor:
        return apply_scale(output, self._scale(layer, layer.v_scale)).flatten(1)

    def _store(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
    ) -> None:
        loc = KVWriteLoc.for_batch(forward_batch, swa_loc=self._sliding_loc)
        if self._scaled(layer):
            self.token_to_kv_pool.set_kv_buffer(layer, loc, k, v, layer.k_scale, layer.v_scale)
        else:
            self.token_to_kv_pool.set_kv_buffer(layer, loc, k, v)

    def _reads(
        self, layer: RadixAttention, reads: list[Slots]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the keys and values of each read; latent pages serve as both."""
        # These two calls wait until a tier has brought the layer's pages back, so they come first.
        key_buffer = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        value_buffer = (
            None if self._latent else self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        )
        for slots in reads:
            keys = gather(key_buffer, slots, self._dtype)
            values = keys if value_buffer is None else gather(value_buffer, slots, self._dtype)
            yield keys, values

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


def _scoring(layer: RadixAttention) -> Scoring:
    return Scoring(scale=layer.scaling, soft_cap=layer.logit_cap or 0.0)


def _refuse_model(runner: Any) -> None:
    """Raise UnsupportedError at start where a whole model needs what this backend lacks."""
    if runner.model_config.is_encoder_decoder:
        raise UnsupportedError(
            "sglang_ext_cpu has no cross attention, so it cannot serve an encoder-decoder model; "
            "run with --attention-backend torch_native"
        )


def _refuse_layer(layer: RadixAttention, options: dict[str, Any]) -> None:
    """Raise UnsupportedError rather than answer a kind of attention that would come out wrong."""
    if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
        raise UnsupportedError(
            f"layer {layer.layer_id} is not causal self-attention, which is all that "
            "sglang_ext_cpu computes; run with --attention-backend torch_native"
        )
    given = sorted(name for name, value in options.items() if value is not None)
    if given:
        raise UnsupportedError(
            f"layer {layer.layer_id} wants {', '.join(given)}, which sglang_ext_cpu does not know"
        )

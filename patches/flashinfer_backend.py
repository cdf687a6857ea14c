"""The attention backend over real pages: SGLang's batches and pools in, FlashInfer's calls out.

Chosen by ``--attention-backend sglang_ext_flashinfer``. Prefill reads the pages that it has just
written, as decode does: the same numbers cold and on a hit, and no states to merge. Not yet run on
a GPU: what it calls is tested against FlashInfer's own signatures and float64.
"""

from functools import partial
from importlib.metadata import version
from types import ModuleType
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    KVWriteLoc,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.runtime_context import get_parallel

from sglang_ext.errors import UnsupportedError
from sglang_ext.patches.attention_limits import refuse_cross_attention, refuse_layer
from sglang_ext.patches.cpu_fp8_pages import fp8_layers
from sglang_ext.patches.flashinfer_attention import (
    GraphBuffers,
    HeadShape,
    LatentAttention,
    LatentShape,
    PagedAttention,
)
from sglang_ext.patches.flashinfer_pages import FLASHINFER_PAGES, refuse_without_gpu
from sglang_ext.tiering.page_plan import plan_pages
from sglang_ext.tiering.quantizer import within_range

__all__ = ["FLASHINFER_VERSION", "FlashInferPagesBackend", "load_flashinfer"]

FLASHINFER_VERSION = "0.7.2"
"""The only release whose calls were checked."""

_NAMES = (FLASHINFER_PAGES, "flashinfer")
"""This backend, and the one to take instead of it."""
_PAGE_TYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def load_flashinfer() -> ModuleType:
    """Import FlashInfer; raise UnsupportedError without it, in another release, or without CUDA."""
    if not torch.cuda.is_available():
        refuse_without_gpu(FLASHINFER_PAGES)
    try:
        found = version("flashinfer_python")
        import flashinfer
    except ImportError as error:
        raise UnsupportedError(
            f"{FLASHINFER_PAGES} needs FlashInfer {FLASHINFER_VERSION}, which cannot be imported: "
            f"{error}"
        ) from None
    if found != FLASHINFER_VERSION:
        raise UnsupportedError(
            f"{FLASHINFER_PAGES} was written for FlashInfer {FLASHINFER_VERSION}, found {found}; "
            f"run with --attention-backend {_NAMES[1]}"
        )
    module: ModuleType = flashinfer
    return module


class FlashInferPagesBackend(AttentionBackend):
    """FlashInfer over pages of ``--page-size`` tokens, of bf16 or FP8, by heads or latent."""

    forward_metadata: PagedAttention | LatentAttention | None

    def __init__(self, runner: Any, flashinfer: Any) -> None:
        _refuse_model(runner)
        # SGLang's models look these three up here, by these names.
        self.device = runner.device
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self._latent = bool(runner.use_mla_backend)
        self._page_size = runner.page_size
        self._context_pages = -(-runner.model_config.context_len // runner.page_size)
        self._soft_cap = _soft_cap(runner.model_config)
        self._fp8_layers = fp8_layers(runner)
        workspace = torch.empty(
            envs.SGLANG_FLASHINFER_WORKSPACE_SIZE.get(), dtype=torch.uint8, device=runner.device
        )
        self._build = (
            partial(LatentAttention, flashinfer, workspace, _latent_shape(runner))
            if self._latent
            else partial(PagedAttention, flashinfer, workspace, _head_shape(runner))
        )
        self._eager = self._build()
        self._buffers: GraphBuffers | None = None
        self._captured: dict[int, PagedAttention | LatentAttention] = {}
        self.forward_metadata = None

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan a step that runs without a CUDA graph."""
        if not forward_batch.forward_mode.is_idle():
            self._plan(self._eager, forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make room for the plans of captured decode steps."""
        pages = max_bs * self._context_pages
        self._buffers = GraphBuffers.sized(max_bs, pages, self.device)

    def init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Plan a captured decode step, at the capture and before every replay."""
        if not forward_batch.forward_mode.is_decode_or_idle():
            raise UnsupportedError(
                f"{FLASHINFER_PAGES} captures decode steps only; run with "
                "--cuda-graph-backend-prefill disabled"
            )
        requests = forward_batch.batch_size
        if in_capture and requests not in self._captured:
            assert self._buffers is not None, "SGLang captured before init_cuda_graph_state"
            self._captured[requests] = self._build(self._buffers.first(requests))
        self._plan(self._captured[requests], forward_batch)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of the requests that only fill a captured batch up."""
        return 1

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
        """Store the new rows and attend them; returns ``[rows, heads * value_width]``."""
        refuse_layer(*_NAMES, layer, options)
        self._refuse_scaling(layer)
        if save_kv_cache and k is not None and v is not None:
            self._store(k, v, layer, forward_batch)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        calibrated = self._fp8_layers.get(layer.layer_id)
        if calibrated is None:
            return self._attend(query.contiguous(), layer).flatten(1)
        return calibrated.output(self._attend(calibrated.query(query), layer)).flatten(1)

    forward_decode = forward_extend

    def _plan(
        self, attention: PagedAttention | LatentAttention, forward_batch: ForwardBatch
    ) -> None:
        requests = forward_batch.batch_size
        lengths = _on_host(forward_batch.seq_lens_cpu, forward_batch.seq_lens)[:requests]
        new_rows = (
            torch.ones_like(lengths)
            if forward_batch.forward_mode.is_decode_or_idle()
            else torch.as_tensor(forward_batch.extend_seq_lens_cpu)
        )
        table = self.req_to_token_pool.req_to_token
        lines = forward_batch.req_pool_indices[:requests]
        attention.plan(new_rows, plan_pages(table, lines, lengths, self._page_size))
        self.forward_metadata = attention

    def _attend(self, query: torch.Tensor, layer: RadixAttention) -> torch.Tensor:
        attention, pool = self.forward_metadata, self.token_to_kv_pool
        keys = pool.get_key_buffer(layer.layer_id)
        if isinstance(attention, LatentAttention):
            return attention.run(query, keys)
        assert attention is not None, "a layer ran before init_forward_metadata"
        return attention.run(query, keys, pool.get_value_buffer(layer.layer_id), layer.scaling)

    def _store(
        self, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch
    ) -> None:
        loc, pool = KVWriteLoc.for_batch(forward_batch), self.token_to_kv_pool
        if (calibrated := self._fp8_layers.get(layer.layer_id)) is None:
            pool.set_kv_buffer(layer, loc, within_range(k, pool.dtype), within_range(v, pool.dtype))
            return
        keys = k.reshape(-1, layer.tp_k_head_num, layer.qk_head_dim)
        values = v.reshape(-1, layer.tp_v_head_num, layer.v_head_dim)
        pool.set_kv_buffer(layer, loc, *calibrated.codes(keys, values))

    def _refuse_scaling(self, layer: RadixAttention) -> None:
        """Raise UnsupportedError where a layer is capped or scaled otherwise than planned."""
        if not self._latent and (layer.logit_cap or 0.0) != self._soft_cap:
            raise UnsupportedError(
                f"layer {layer.layer_id} caps its logits at {layer.logit_cap}, the model at "
                f"{self._soft_cap}; run with --attention-backend {_NAMES[1]}"
            )
        if layer.k_scale is not None and layer.layer_id not in self._fp8_layers:
            raise UnsupportedError(
                f"layer {layer.layer_id} brings scales of its own for FP8 pages, which "
                f"{FLASHINFER_PAGES} does not fold; run with --attention-backend {_NAMES[1]}"
            )


def _on_host(copy: torch.Tensor | None, original: torch.Tensor) -> torch.Tensor:
    """Return the copy that SGLang keeps on the host; without one, wait for the device."""
    return original.cpu() if copy is None else copy


def _head_shape(runner: Any) -> HeadShape:
    config, ranks = runner.model_config, get_parallel().attn_tp_size
    return HeadShape(
        query_heads=config.num_attention_heads // ranks,
        kv_heads=config.get_num_kv_heads(ranks),
        dim=config.head_dim,
        page_size=runner.page_size,
        query_dtype=runner.dtype,
        page_dtype=runner.token_to_kv_pool.dtype,
        soft_cap=_soft_cap(config),
    )


def _soft_cap(model_config: Any) -> float:
    return getattr(model_config.hf_text_config, "attn_logit_softcapping", None) or 0.0


def _latent_shape(runner: Any) -> LatentShape:
    config, page_dtype = runner.model_config, runner.token_to_kv_pool.dtype
    if page_dtype == torch.float8_e5m2:
        raise UnsupportedError(
            "FlashInfer reads latent pages (MLA) in fp8_e4m3 or bf16, not in fp8_e5m2; set "
            "engine.kv_cache_dtype (or --kv-cache-dtype)"
        )
    return LatentShape(
        query_heads=config.num_attention_heads // get_parallel().attn_tp_size,
        rank=config.kv_lora_rank,
        tail=config.qk_rope_head_dim,
        page_size=runner.page_size,
        query_dtype=runner.dtype,
        page_dtype=page_dtype,
        softmax_scale=config.scaling,
    )


def _refuse_model(runner: Any) -> None:
    """Raise UnsupportedError at start where a whole model, or the way it is run, needs more."""
    refuse_cross_attention(*_NAMES, runner.model_config)
    pool = runner.token_to_kv_pool
    known = isinstance(pool, MHATokenToKVPool | MLATokenToKVPool)
    if not known or isinstance(pool, DSATokenToKVPool) or pool.dtype not in _PAGE_TYPES:
        what = f"a {type(pool).__name__} of {pool.dtype}"
    elif runner.sliding_window_size is not None:
        what = "a sliding window"
    elif not runner.spec_algorithm.is_none():
        what = "speculative decoding"
    elif get_parallel().dcp_enabled:
        what = "decode context parallelism"
    else:
        return
    raise UnsupportedError(
        f"{FLASHINFER_PAGES} does not know {what} yet; run with --attention-backend {_NAMES[1]}"
    )

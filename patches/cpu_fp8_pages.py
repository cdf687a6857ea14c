"""FP8 pages with calibrated channels on a CPU: what a layer stores, and how attention reads it."""

import logging
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel

from sglang_ext.errors import ScalesError, UnsupportedError
from sglang_ext.patches.cpu_fp8_writer import Fp8Writer
from sglang_ext.tiering.folding import Folding
from sglang_ext.tiering.quantizer import FORMATS, Format
from sglang_ext.tiering.scales import LayerChannels, Scales
from sglang_ext.tiering.scales_in_force import scales_in_force

__all__ = ["Fp8LatentLayer", "Fp8Layer", "fp8_layers"]

logger = logging.getLogger(__name__)


class Fp8Layer:
    """One calibrated layer of one rank: what it stores, and how attention reads it."""

    def __init__(self, channels: LayerChannels, format: Format, query_heads: int) -> None:
        self._keys = Fp8Writer(channels.keys, format)
        self._values = Fp8Writer(channels.values, format)
        folding = Folding(channels.keys, channels.values, query_heads)
        self.query, self.output = folding.query, folding.output

    def codes(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the pool stores for new rows [tokens, KV heads, dim]: FP8 of that shape."""
        return self._keys.codes(keys), self._values.codes(values)


class Fp8LatentLayer(Fp8Layer):
    """A calibrated layer of latent attention: one row is the key and, but for its tail, the value.

    So keys and values have the same channels, and nothing is rounded twice.
    """

    def codes(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the pool stores for new rows [tokens, 1, rank + tail], and its first part."""
        rows = self._keys.codes(keys)
        return rows, rows[..., : values.shape[-1]]


def fp8_layers(runner: Any) -> dict[int, Fp8Layer]:
    """Return the calibrated layers of this model runner; others keep SGLang's plain cast.

    Raises ScalesError or UnsupportedError where the scales are not for this model.
    """
    scales, format = scales_in_force(), _format(runner.token_to_kv_pool.dtype)
    if scales is None and format is not None:
        logger.warning(
            "%s pages without calibrated scales: scale 1, mean 0 (see sglang-ext calibrate)",
            format.name,
        )
    # A draft model has other weights than the one that was calibrated.
    if scales is None or runner.is_draft_worker:
        return {}
    _check(runner, scales, format)
    logger.info("%s pages with scales calibrated on %s", scales.format.name, scales.model)
    rank, ranks = get_parallel().attn_tp_rank, get_parallel().attn_tp_size
    heads = runner.model_config.num_attention_heads // ranks
    kind = Fp8LatentLayer if runner.use_mla_backend else Fp8Layer
    return {
        number: kind(channels.to(runner.device), scales.format, heads)
        for number, channels in scales.of_rank(rank, ranks).layers.items()
    }


def _format(dtype: torch.dtype) -> Format | None:
    return next((format for format in FORMATS.values() if format.dtype is dtype), None)


def _check(runner: Any, scales: Scales, format: Format | None) -> None:
    if scales.format is not format:
        raise ScalesError(
            f"the scales are for {scales.format.name}, but pages {runner.token_to_kv_pool.dtype}; "
            f"set engine.kv_cache_dtype (or --kv-cache-dtype) to {scales.format.name}"
        )
    capped = getattr(runner.model_config.hf_text_config, "attn_logit_softcapping", None)
    if capped and _centred(scales):
        raise UnsupportedError(
            "the scales have means of K, which a model with capped attention logits cannot fold"
        )
    expected = _shapes(runner)
    for number, layer in scales.layers.items():
        found = (tuple(layer.keys.scale.shape), tuple(layer.values.scale.shape))
        if found != expected:
            raise ScalesError(
                f"layer {number} of the scales has {found} heads and channels of K and V, "
                f"the model {expected}"
            )
        if runner.use_mla_backend and not _one_row(layer):
            raise ScalesError(
                f"layer {number} of the scales has other channels for V than for K, but a latent "
                "row (MLA) is both"
            )


def _shapes(runner: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """Heads and channels of K and of V in one layer of the whole model."""
    config = runner.model_config
    if runner.use_mla_backend:
        rank = config.kv_lora_rank
        return (1, rank + config.qk_rope_head_dim), (1, rank)
    shape = (config.get_total_num_kv_heads(), config.head_dim)
    return shape, shape


def _one_row(layer: LayerChannels) -> bool:
    width = layer.values.scale.shape[1]
    pairs = (
        (layer.keys.scale, layer.values.scale),
        (layer.keys.mean, layer.values.mean),
    )
    return all(torch.equal(keys[:, :width], values) for keys, values in pairs)


def _centred(scales: Scales) -> bool:
    return any(bool(layer.keys.mean.any()) for layer in scales.layers.values())

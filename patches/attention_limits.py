"""What an attention backend of ours refuses, rather than answer what would come out wrong."""

from typing import Any

from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

from sglang_ext.errors import UnsupportedError

__all__ = ["refuse_cross_attention", "refuse_layer"]


def refuse_cross_attention(backend: str, instead: str, model_config: Any) -> None:
    """Raise UnsupportedError at start for a model that attends to an encoder."""
    if model_config.is_encoder_decoder:
        raise UnsupportedError(
            f"{backend} has no cross attention, so it cannot serve an encoder-decoder model; "
            f"run with --attention-backend {instead}"
        )


def refuse_layer(
    backend: str, instead: str, layer: RadixAttention, options: dict[str, Any]
) -> None:
    """Raise UnsupportedError for a layer or an option that ``backend`` does not compute."""
    if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
        raise UnsupportedError(
            f"layer {layer.layer_id} is not causal self-attention, which is all that "
            f"{backend} computes; run with --attention-backend {instead}"
        )
    given = sorted(name for name, value in options.items() if value is not None)
    if given:
        raise UnsupportedError(
            f"layer {layer.layer_id} wants {', '.join(given)}, which {backend} does not know"
        )

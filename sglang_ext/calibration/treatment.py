"""Run a model in transformers with its K and V looked at, or replaced, on the way to attention.

For calibration only: the served model runs in SGLang. Attention sees K after RoPE, as pages do.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from sglang_ext.errors import UnsupportedError

__all__ = ["Treatment", "load_model", "logits_of", "treated"]

Treatment = Callable[
    [int, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]
]
"""Takes a layer's number, Q [tokens, query heads, dim], K and V [tokens, KV heads, dim], and
returns K and V to attend to."""

_ATTENTION = "sglang_ext_treated"
_treatments: list[Treatment] = []


def load_model(folder: Path) -> PreTrainedModel:
    """Load the model in ``folder`` in float32; raise ``UnsupportedError`` for latent attention."""
    config = AutoConfig.from_pretrained(folder)
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedError(
            f"{folder}: calibration of latent attention (MLA) is not supported; its pages hold a "
            "compressed vector that transformers does not show"
        )
    AttentionInterface.register(_ATTENTION, _attend)
    AttentionMaskInterface.register(_ATTENTION, sdpa_mask)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=_ATTENTION
    )
    return model.eval()


@contextmanager
def treated(treatment: Treatment) -> Iterator[None]:
    """Have every attention call of this process pass its K and V through ``treatment``."""
    _treatments.append(treatment)
    try:
        yield
    finally:
        _treatments.pop()


@torch.inference_mode()
def logits_of(model: PreTrainedModel, chunk: torch.Tensor) -> torch.Tensor:
    """Return what the model expects after each token of ``chunk``: float32 [tokens, vocabulary]."""
    logits: torch.Tensor = model(chunk.unsqueeze(0), use_cache=False).logits[0]
    return logits.float()


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' own attention, over treated K and V [1, KV heads, tokens, dim]."""
    for treatment in _treatments:
        rows = treatment(module.layer_idx, *(x[0].transpose(0, 1) for x in (query, key, value)))
        key, value = (x.transpose(0, 1).unsqueeze(0).to(query.dtype) for x in rows)
    output: tuple[torch.Tensor, None] = sdpa_attention_forward(
        module, query, key, value, *args, **kwargs
    )
    return output

"""Run a model in transformers with its K and V looked at, or replaced, on the way to attention.

For calibration only: the served model runs in SGLang. Attention sees K after RoPE, as pages do. A
model with latent attention (MLA) shows its latents where it would cache them.
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
    DynamicCache,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from sglang_ext.errors import UnsupportedError

__all__ = ["Treatment", "latent_rank", "load_model", "logits_of", "treated"]

Treatment = Callable[
    [int, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]
]
"""Takes a layer's number, Q [tokens, query heads, dim], K and V [tokens, KV heads, dim], and
returns K and V to attend to. Of latent attention there is no Q [0, 1, dim]; K is a whole row
[tokens, 1, rank + tail], and V what of it is the value [tokens, 1, rank]; K's is attended to."""

_ATTENTION = "sglang_ext_treated"
_treatments: list[Treatment] = []


def load_model(folder: Path) -> PreTrainedModel:
    """Load the model in ``folder`` in float32, ready to be treated."""
    latent = getattr(AutoConfig.from_pretrained(folder), "kv_lora_rank", None)
    AttentionInterface.register(_ATTENTION, _attend)
    AttentionMaskInterface.register(_ATTENTION, sdpa_mask)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa" if latent else _ATTENTION
    )
    return model.eval()


def latent_rank(model: PreTrainedModel) -> int | None:
    """Return how many channels of a row are the value, None without latent attention."""
    rank: int | None = getattr(model.config, "kv_lora_rank", None)
    return rank


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
    rank = latent_rank(model)
    cache = None if rank is None else _Latents(rank)
    found = model(chunk.unsqueeze(0), past_key_values=cache, use_cache=cache is not None)
    logits: torch.Tensor = found.logits[0]
    return logits.float()


class _Latents(DynamicCache):
    """Stands where the model would cache its latents: hands them back treated, and keeps none."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Treat latents [1, 1, tokens, rank] and their rotary tails [1, 1, tokens, tail]."""
        if key_states.shape[1] != 1 or key_states.shape[-1] != self._rank:
            raise UnsupportedError(
                "this model has latent attention (MLA), but its code in transformers caches keys "
                "and values and no latents, so it cannot be calibrated"
            )
        rows = torch.cat([key_states, value_states], dim=-1)[0].transpose(0, 1)
        for treatment in _treatments:
            rows, _ = treatment(layer_idx, rows[:0], rows, rows[..., : self._rank])
        rows = rows.transpose(0, 1).unsqueeze(0).to(key_states.dtype)
        return rows[..., : self._rank], rows[..., self._rank :]


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

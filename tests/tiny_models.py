"""Tiny random models on disk, one for every kind of attention that the cache must serve.

All take the demo model's tokenizer (or the one in ``tokenizer``), are seeded, in bfloat16, and have
even head counts, so that ``--tp 2`` works. Weights are drawn wide (standard deviation 0.1, five
times the usual): attention then outweighs the embedding, and a wrong page changes the answer.

Random logits tie now and then in bfloat16. Where two kernels are compared, compare log
probabilities, or run in float32. FlashInfer's kernels want head sizes of 64, 128 or 256.
"""

import shutil
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from sglang_ext.demo_model import demo_model_path

__all__ = [
    "tiny_latent_moe",
    "tiny_llama",
    "tiny_mla",
    "tiny_moe",
    "tiny_sliding_window",
    "tiny_softcap",
]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_COMMON = {
    "vocab_size": 49152,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "max_position_embeddings": 8192,
    "initializer_range": 0.1,
}
_SMALL = {**_COMMON, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
_WIDE_HEADS = {**_SMALL, "num_key_value_heads": 2, "head_dim": 64}
# A factor of 1 changes nothing; SGLang knows no plain rotary embedding for DeepSeek on a CPU.
_PLAIN_YARN = {
    "rope_type": "yarn",
    "type": "yarn",
    "factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 8192,
}
# What DeepSeek's models have alike: two experts and a shared one where a layer has experts.
_LATENT = {
    "moe_intermediate_size": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "topk_group": 1,
    "rope_parameters": _PLAIN_YARN,
    # Not known to transformers, but SGLang reads it.
    "moe_layer_freq": 1,
}


def tiny_llama(
    path: Path,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    layers: int = 2,
    hidden: int = 128,
    head_dim: int = 32,
    seed: int = 0,
    tokenizer: Path | None = None,
) -> Path:
    """Grouped-query attention, the plain case."""
    config = LlamaConfig(
        **_COMMON,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
    )
    return _write(config, path, seed, tokenizer)


def tiny_sliding_window(
    path: Path, *, window: int = 64, layers: int = 2, seed: int = 0, tokenizer: Path | None = None
) -> Path:
    """Gemma 3: even layers see ``window`` tokens, odd layers see all."""
    config = Gemma3TextConfig(
        **_WIDE_HEADS,
        num_hidden_layers=layers,
        query_pre_attn_scalar=64,
        sliding_window=window,
        layer_types=[("sliding_attention", "full_attention")[i % 2] for i in range(layers)],
    )
    return _write(config, path, seed, tokenizer)


def tiny_softcap(
    path: Path, *, layers: int = 2, seed: int = 0, tokenizer: Path | None = None
) -> Path:
    """Gemma 2: attention scores capped at 2 and logits at 10, low enough to matter; no window."""
    config = Gemma2Config(
        **_WIDE_HEADS,
        num_hidden_layers=layers,
        query_pre_attn_scalar=64,
        # Read by SGLang; transformers reads hidden_activation, whose default is the same.
        hidden_act="gelu_pytorch_tanh",
        attn_logit_softcapping=2.0,
        final_logit_softcapping=10.0,
        sliding_window=_COMMON["max_position_embeddings"],
    )
    return _write(config, path, seed, tokenizer)


def tiny_mla(path: Path, *, layers: int = 2, seed: int = 0, tokenizer: Path | None = None) -> Path:
    """DeepSeek-V2 with dense layers only; latents of the real size (512 + 64), as kernels want."""
    config = DeepseekV2Config(
        **_SMALL,
        **_LATENT,
        num_hidden_layers=layers,
        first_k_dense_replace=layers,
        n_routed_experts=4,
        n_group=1,
        q_lora_rank=None,
        # Not known to transformers, but SGLang reads it.
        scoring_func="softmax",
    )
    return _write(config, path, seed, tokenizer)


def tiny_latent_moe(
    path: Path, *, layers: int = 2, seed: int = 0, tokenizer: Path | None = None
) -> Path:
    """DeepSeek-V3: latents, and from the second layer on two of 8 experts and a shared one.

    8 heads, so that latents are less than a third of what as many keys and values would take.
    """
    config = DeepseekV3Config(
        **{**_SMALL, "num_attention_heads": 8, "num_key_value_heads": 8},
        **_LATENT,
        num_hidden_layers=layers,
        first_k_dense_replace=1,
        n_routed_experts=8,
        n_group=2,
        q_lora_rank=64,
        num_nextn_predict_layers=0,
        # Not known to transformers, but SGLang reads them.
        scoring_func="sigmoid",
        topk_method="noaux_tc",
    )
    return _write(config, path, seed, tokenizer)


def tiny_moe(
    path: Path, *, layers: int = 2, experts: int = 8, seed: int = 0, tokenizer: Path | None = None
) -> Path:
    """Qwen3-MoE: two of ``experts`` experts a token in every layer."""
    config = Qwen3MoeConfig(
        **_WIDE_HEADS,
        moe_intermediate_size=128,
        num_hidden_layers=layers,
        num_experts=experts,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    )
    return _write(config, path, seed, tokenizer)


def _write(config: PreTrainedConfig, path: Path, seed: int, tokenizer: Path | None) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    _outweigh_embedding(model)
    model.save_pretrained(path)
    source = tokenizer or demo_model_path()
    for name in _TOKENIZER_FILES:
        shutil.copyfile(source / name, path / name)
    return path


def _outweigh_embedding(model: PreTrainedModel) -> None:
    """Keep Gemma, whose output is its embedding, from repeating the last token for ever."""
    for layer in model.modules():
        if hasattr(layer, "post_feedforward_layernorm"):
            # Gemma's norms scale by 1 + weight, at the end of each half of a layer.
            torch.nn.init.constant_(layer.post_attention_layernorm.weight, 3.0)
            torch.nn.init.constant_(layer.post_feedforward_layernorm.weight, 3.0)

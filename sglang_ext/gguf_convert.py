"""From one GGUF file (llama.cpp's format) to a Hugging Face model folder in bfloat16.

Only what the demo model needs: the llama architecture with tied embeddings. Whatever else the file
holds is refused by name, so that a wrong model is never written silently.

Files are written by Python, not by the Rust writers of ``safetensors`` and ``tokenizers``: a full
disk is then an ``OSError`` with its ``errno``, not a bare ``Exception``.
"""

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.torch
import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sglang_ext.errors import DemoModelError

__all__ = ["convert_gguf", "permute_rotary", "unpermute_rotary"]

_OUTER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# transformers takes every GGUF tokenizer of type gpt2 for GPT-2's own. SmolLM first splits off each
# digit, so that two spaces before a number are one token.
_SMOLLM_SPLIT = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
_LAYER_TENSOR = re.compile(r"blk\.(?P<layer>\d+)\.(?P<part>\w+)\.weight")


def convert_gguf(gguf_file: Path, folder: Path) -> None:
    """Write ``gguf_file`` as a Hugging Face model into the existing ``folder``.

    Takes seconds and about five times the file's size in memory. On an error ``folder`` may hold
    some of the files; the caller throws it away. Raises ``DemoModelError`` for a model that is not
    a tied llama, ``OSError`` when a file cannot be read or written.
    """
    reader = gguf.GGUFReader(gguf_file)
    config = _model_config(reader)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _generation_config(config))
    _write_weights(reader, config, folder / "model.safetensors")
    _require(reader, "tokenizer.ggml.pre", "smollm")
    _write_tokenizer(gguf_file, config, folder)


def permute_rotary(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of a q or k projection from Hugging Face's layout to llama.cpp's.

    In every head, Hugging Face rotates row ``i`` with row ``i + size/2``; llama.cpp rotates row
    ``2i`` with row ``2i + 1``.
    """
    halves = weight.reshape(heads, 2, -1, weight.shape[-1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def unpermute_rotary(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo ``permute_rotary``: from llama.cpp's layout to Hugging Face's."""
    pairs = weight.reshape(heads, -1, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _field(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise DemoModelError(f"The GGUF file has no field {key!r}; it is not the expected model.")
    return field.contents()


def _require(reader: gguf.GGUFReader, key: str, expected: str) -> None:
    found = _field(reader, key)
    if found != expected:
        raise DemoModelError(f"The GGUF file has {key} = {found!r}, expected {expected!r}.")


def _model_config(reader: gguf.GGUFReader) -> dict[str, Any]:
    _require(reader, "general.architecture", "llama")
    heads = _field(reader, "llama.attention.head_count")
    hidden = _field(reader, "llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": _field(reader, "llama.vocab_size"),
        "hidden_size": hidden,
        "head_dim": hidden // heads,
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "hidden_act": "silu",
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "rms_norm_eps": _shortest_float(_field(reader, "llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _field(reader, "llama.rope.freq_base"),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
    }


def _shortest_float(value: float) -> float:
    """GGUF stores 1e-05 as float32: give back 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _generation_config(config: dict[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}


def _write_weights(reader: gguf.GGUFReader, config: dict[str, Any], path: Path) -> None:
    weights = {_hf_name(t.name): _to_bf16(t, config) for t in reader.tensors}
    path.write_bytes(safetensors.torch.save(weights, metadata={"format": "pt"}))


def _hf_name(name: str) -> str:
    if name in _OUTER_TENSORS:
        return _OUTER_TENSORS[name]
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or match["part"] not in _LAYER_TENSORS:
        raise DemoModelError(f"The GGUF file holds a tensor {name!r} that no tied llama has.")
    return f"model.layers.{match['layer']}.{_LAYER_TENSORS[match['part']]}.weight"


def _to_bf16(tensor: gguf.ReaderTensor, config: dict[str, Any]) -> torch.Tensor:
    weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    if tensor.name.endswith("attn_q.weight"):
        weight = unpermute_rotary(weight, config["num_attention_heads"])
    elif tensor.name.endswith("attn_k.weight"):
        weight = unpermute_rotary(weight, config["num_key_value_heads"])
    return torch.tensor(weight).to(torch.bfloat16)


def _write_tokenizer(gguf_file: Path, config: dict[str, Any], folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, local_files_only=True
    )
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = _SMOLLM_SPLIT
    (folder / "tokenizer.json").write_text(backend.to_str(), "utf-8")
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(tokenizer, config))
    (folder / "chat_template.jinja").write_text(tokenizer.chat_template, "utf-8")


def _tokenizer_config(tokenizer: PreTrainedTokenizerFast, config: dict[str, Any]) -> dict[str, Any]:
    return {
        # The one name of the class that every version of transformers can load.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "pad_token": tokenizer.pad_token,
        "unk_token": tokenizer.unk_token,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")

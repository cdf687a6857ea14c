"""The converter, against a model that transformers itself made and real full-disk errors."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from sglang_ext.errors import DemoModelError
from sglang_ext.gguf_convert import convert_gguf, permute_rotary, unpermute_rotary

_HEADS, _KV_HEADS, _HEAD_DIM, _HIDDEN = 4, 2, 8, 32
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_TOKENS = [*_SPECIAL, *sorted(ByteLevel.alphabet()), "ĠĠ"]
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}"
_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

Change = Callable[[gguf.GGUFWriter], object]


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(_TOKENS),
        hidden_size=_HIDDEN,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS,
        head_dim=_HEAD_DIM,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def make_gguf(path: Path, model: LlamaForCausalLM, change: Change | None = None) -> Path:
    """Write ``model`` the way llama.cpp does; ``change`` spoils the file before it is closed."""
    writer = gguf.GGUFWriter(path, "llama")
    _add_shape(writer, model.config)
    _add_tokenizer(writer)
    for name, weight in model.state_dict().items():
        if name != "lm_head.weight":
            writer.add_tensor(_gguf_name(name), _llama_cpp_order(name, weight))
    if change:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_shape(writer: gguf.GGUFWriter, config: LlamaConfig) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_context_length(256)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(_TOKENS)
    writer.add_token_types([3 if token in _SPECIAL else 1 for token in _TOKENS])
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(_TEMPLATE)


def _gguf_name(name: str) -> str:
    for ours, theirs in _GGUF_NAMES.items():
        name = name.replace(ours, theirs)
    return name


def _llama_cpp_order(name: str, weight: torch.Tensor) -> np.ndarray:
    array = weight.float().numpy()
    if "q_proj" in name:
        return np.ascontiguousarray(permute_rotary(array, _HEADS))
    if "k_proj" in name:
        return np.ascontiguousarray(permute_rotary(array, _KV_HEADS))
    return array


@pytest.fixture(scope="module")
def original() -> LlamaForCausalLM:
    return make_model()


@pytest.fixture(scope="module")
def converted(original: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    convert_gguf(make_gguf(folder / "m.gguf", original), folder)
    return folder


def test_logits_are_those_of_the_original(original: LlamaForCausalLM, converted: Path) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(
        converted, dtype=torch.float32, output_loading_info=True
    )
    tokens = torch.arange(3, 43).reshape(2, 20)
    with torch.no_grad():
        expected = make_float(original)(tokens).logits
        torch.testing.assert_close(model(tokens).logits, expected)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]


def make_float(model: LlamaForCausalLM) -> LlamaForCausalLM:
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    return copy.float().eval()


def test_config_comes_from_the_file(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    assert config["rope_theta"] == 5000.0
    assert config["rms_norm_eps"] == 1e-5
    assert config["head_dim"] == _HEAD_DIM
    assert config["max_position_embeddings"] == 256
    assert config["tie_word_embeddings"] is True
    assert json.loads((converted / "generation_config.json").read_text())["eos_token_id"] == 2


def test_tokenizer_and_chat_template(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.tokenize("a  1<|im_end|>") == ["a", "ĠĠ", "1", "<|im_end|>"]
    assert (converted / "chat_template.jinja").read_text() == _TEMPLATE
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "x<|im_end|>"


@pytest.mark.parametrize("heads", [1, 3, 9])
def test_unpermute_undoes_permute(heads: int) -> None:
    weight = np.arange(heads * 64 * 5, dtype=np.float32).reshape(heads * 64, 5)
    np.testing.assert_array_equal(unpermute_rotary(permute_rotary(weight, heads), heads), weight)
    np.testing.assert_array_equal(permute_rotary(unpermute_rotary(weight, heads), heads), weight)


def test_permute_moves_rows_as_the_formula_says() -> None:
    heads, size = 3, 8
    weight = np.arange(heads * size * 2).reshape(heads * size, 2)
    permuted = permute_rotary(weight, heads)
    for head in range(heads):
        for i in range(size // 2):
            for half in range(2):
                theirs = head * size + 2 * i + half
                ours = head * size + i + half * size // 2
                np.testing.assert_array_equal(permuted[theirs], weight[ours])


def test_both_layouts_rotate_to_the_same_scores() -> None:
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 8, 4))
    x, y = rng.normal(size=(2, 4))
    angle_q, angle_k = 5 * 0.3 ** np.arange(4), 2 * 0.3 ** np.arange(4)
    halves = rotate_halves(q @ x, angle_q) @ rotate_halves(k @ y, angle_k)
    pairs = rotate_pairs(permute_rotary(q, 1) @ x, angle_q) @ rotate_pairs(
        permute_rotary(k, 1) @ y, angle_k
    )
    assert halves == pytest.approx(pairs)


def rotate_halves(vector: np.ndarray, angle: np.ndarray) -> np.ndarray:
    turned = (vector[:4] + 1j * vector[4:]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag])


def rotate_pairs(vector: np.ndarray, angle: np.ndarray) -> np.ndarray:
    turned = (vector[::2] + 1j * vector[1::2]) * np.exp(1j * angle)
    return np.stack([turned.real, turned.imag], axis=1).ravel()


def _extra_head(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("output.weight", np.zeros((4, 4), np.float32))


def _extra_layer_part(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("blk.0.ffn_gate_exps.weight", np.zeros((4, 4), np.float32))


def _other_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.kv_data[0].pop("tokenizer.ggml.pre")
    writer.add_tokenizer_pre("llama-bpe")


def _other_architecture(writer: gguf.GGUFWriter) -> None:
    writer.kv_data[0].pop("general.architecture")
    writer.add_string("general.architecture", "qwen3")


def _no_rope(writer: gguf.GGUFWriter) -> None:
    writer.kv_data[0].pop("llama.rope.freq_base")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_extra_head, "'output.weight'"),
        (_extra_layer_part, "'blk.0.ffn_gate_exps.weight'"),
        (_other_tokenizer, "tokenizer.ggml.pre = 'llama-bpe', expected 'smollm'"),
        (_other_architecture, "general.architecture = 'qwen3', expected 'llama'"),
        (_no_rope, "no field 'llama.rope.freq_base'"),
    ],
)
def test_another_model_is_refused_by_name(
    original: LlamaForCausalLM, tmp_path: Path, change: Change, problem: str
) -> None:
    file = make_gguf(tmp_path / "m.gguf", original, change)
    with pytest.raises(DemoModelError, match=problem):
        convert_gguf(file, tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_full_disk_is_an_os_error(original: LlamaForCausalLM, tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        convert_gguf(make_gguf(tmp_path / "m.gguf", original), tmp_path)

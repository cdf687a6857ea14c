"""The real demo model: fetched when it is missing, then proved by what it answers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from sglang_ext.demo_model import DEMO_MODEL_NAME, demo_model_path

_QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def model_path() -> Path:
    return demo_model_path()


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(model_path, local_files_only=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_answers_and_stops(
    model_path: Path, tokenizer: PreTrainedTokenizerFast, dtype: torch.dtype
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype, local_files_only=True)
    prompt = tokenizer.apply_chat_template(
        _QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, do_sample=False, max_new_tokens=40)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


def test_shape(model_path: Path) -> None:
    assert DEMO_MODEL_NAME in model_path.name
    config = json.loads((model_path / "config.json").read_text())
    expected = {
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    assert {key: config[key] for key in expected} == expected


def test_weights_are_bf16_without_an_output_matrix(model_path: Path) -> None:
    with safe_open(model_path / "model.safetensors", "pt") as weights:
        names = list(weights.keys())
        assert {weights.get_tensor(name).dtype for name in names[:20]} == {torch.bfloat16}
    assert len(names) == 30 * 9 + 2
    assert "lm_head.weight" not in names


def test_chat_template_has_the_original_system_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    default = tokenizer.apply_chat_template(_QUESTION, tokenize=False, add_generation_prompt=True)
    assert default == (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    own = [{"role": "system", "content": "Be brief."}, *_QUESTION]
    assert tokenizer.apply_chat_template(own, tokenize=False).startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    )


def test_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "Trial 12345:\ttabs,\n\n  é 日本 don't 😀"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    # The original splits off every digit before anything else.
    assert tokenizer.tokenize("a  12\n\n3") == ["a", "ĠĠ", "1", "2", "ĊĊ", "3"]
    assert tokenizer.eos_token_id == tokenizer.encode("<|im_end|>")[0] == 2

"""Every tiny model loads with transformers, is repeatable, and answers from its whole context."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests import tiny_models

Maker = Callable[..., Path]
_MAKERS: list[Maker] = [getattr(tiny_models, name) for name in tiny_models.__all__]
_PROMPT = torch.arange(100, 148).reshape(1, 48)


@pytest.fixture(scope="module", params=_MAKERS, ids=lambda maker: maker.__name__)
def maker(request: pytest.FixtureRequest) -> Maker:
    return request.param


@pytest.fixture(scope="module")
def folder(maker: Maker, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return maker(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    loaded, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", local_files_only=True, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return loaded


def test_small_bf16_with_a_fitting_tokenizer(folder: Path, model: PreTrainedModel) -> None:
    assert model.dtype == torch.bfloat16
    assert sum(file.stat().st_size for file in folder.iterdir()) < 40e6
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.eos_token_id == model.config.eos_token_id
    assert tokenizer.chat_template


def test_heads_divide_by_two(model: PreTrainedModel) -> None:
    assert model.config.num_attention_heads % 2 == 0
    assert model.config.num_key_value_heads % 2 == 0


def test_same_seed_same_weights(folder: Path, maker: Maker, tmp_path: Path) -> None:
    torch.manual_seed(1234)
    again = maker(tmp_path / "again", tokenizer=folder) / "model.safetensors"
    other = maker(tmp_path / "other", tokenizer=folder, seed=1) / "model.safetensors"
    assert again.read_bytes() == (folder / "model.safetensors").read_bytes()
    assert other.read_bytes() != again.read_bytes()


def test_answers_from_the_whole_context(model: PreTrainedModel) -> None:
    changed = _PROMPT.clone()
    changed[0, 2] = 7000
    first = answer(model, _PROMPT)
    assert answer(model, changed) != first
    # Not the same token over and over, which would hide a wrong page.
    assert len(set(first)) > 3


def answer(model: PreTrainedModel, prompt: torch.Tensor) -> list[int]:
    output = model.generate(prompt, do_sample=False, max_new_tokens=8, min_new_tokens=8)
    return output[0, prompt.shape[1] :].tolist()

"""From a public system prompt to the tokens that begin every conversation under it."""

from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from sglang_ext.demo_model import demo_model_path
from sglang_ext.public_prefixes import public_prefixes, public_run
from sglang_ext.tenancy.loader import parse_policy

SYSTEM = "You are the assistant of many customers, and you answer briefly."


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(demo_model_path())


def _tokens(tokenizer: PreTrainedTokenizerBase, system: str, user: str) -> list[int]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    rendered = tokenizer.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    return list(rendered)


@pytest.mark.parametrize("user", ["hello", "apple", "7", "\n\nspaces", " ", "日本語", "<|im_end|>"])
def test_every_conversation_begins_with_the_run(
    tokenizer: PreTrainedTokenizerBase, user: str
) -> None:
    run = public_run(tokenizer, SYSTEM)
    common = _tokens(tokenizer, SYSTEM, user)[: len(run)]
    # What the user writes may merge with the template's last character, never with what is before.
    assert common[:-1] == run[:-1]


def test_the_run_holds_the_whole_system_prompt_and_nothing_of_the_user(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    text = tokenizer.decode(public_run(tokenizer, SYSTEM))
    assert SYSTEM in text
    assert "apple" not in text
    assert text.endswith("user\n")


def test_another_system_prompt_has_another_run(tokenizer: PreTrainedTokenizerBase) -> None:
    run = public_run(tokenizer, SYSTEM)
    other = _tokens(tokenizer, "Another prompt.", "hello")
    assert other[: len(run)] != run


def test_a_policy_without_public_prefixes_reads_no_tokenizer() -> None:
    """No engine runs in this process, so that asking for its tokenizer would raise."""
    policy = parse_policy("version: 1\ntenants: {a: {}}")
    ctx = SimpleNamespace(params=SimpleNamespace(page_size=16))
    assert not public_prefixes(policy, ctx)

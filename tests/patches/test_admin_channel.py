"""What we ask SGLang's tokenizer manager to do for a client."""

import asyncio
import inspect
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sglang_ext.patches.admin_channel import replay, tokenize
from sglang_ext.request_tag import RequestTag
from sglang_ext.tenancy.identity import SYSTEM, Identity, current_identity
from sglang_ext.types import Owner, TenantId

CALLER = Identity(TenantId("a"), Owner("t:a"), tag=RequestTag("chat"))


class _Manager:
    """Stands for SGLang's; remembers requests, and as whom they came."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **meta: Any) -> None:
        self.meta = meta
        self.seen: list[tuple[Any, Identity]] = []
        state = SimpleNamespace(tokenizer_manager=self)
        monkeypatch.setattr(http_server, "_global_state", state)

    async def _tokenize_texts(self, texts: str) -> tuple[list[int], None]:
        return [len(word) for word in texts.split()], None

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncGenerator[Any, None]:
        self.seen.append((obj, current_identity.get()))
        if "refused" in self.meta:
            raise ValueError(self.meta["refused"])
        yield {"meta_info": self.meta}


def test_the_tokenizer_is_called_as_sglang_calls_it() -> None:
    names = list(inspect.signature(TokenizerManager._tokenize_texts).parameters)
    assert names == ["self", "texts", "is_cross_encoder"]


def test_text_is_tokenized_as_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    _Manager(monkeypatch)
    assert asyncio.run(tokenize("one three")) == [3, 5]


@pytest.mark.parametrize(
    ("details", "where"),
    [
        ({"device": 16, "host": 8, "storage": 4}, (16, 8, 4)),
        ({"device": 28, "host": 0}, (28, 0, 0)),
        (None, (28, 0, 0)),
    ],
    ids=str,
)
def test_a_text_comes_back_as_its_tenants(
    monkeypatch: pytest.MonkeyPatch, details: Any, where: tuple[int, int, int]
) -> None:
    manager = _Manager(monkeypatch, cached_tokens=28, cached_tokens_details=details)
    found = asyncio.run(replay([1] * 29, "key", "salt", CALLER))
    assert (found["hbm_tokens"], found["cpu_tokens"], found["nvme_tokens"]) == where
    assert found["computed_tokens"] == 1
    ((request, identity),) = manager.seen
    assert identity == CALLER
    assert request.sampling_params["max_new_tokens"] == 0
    assert (request.extra_key, request.cache_salt) == ("key", "salt")
    assert current_identity.get() == SYSTEM


def test_a_refusal_is_handed_on_and_the_caller_is_itself_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _Manager(monkeypatch, refused="too long")

    async def scenario() -> Identity:
        with pytest.raises(ValueError, match="too long"):
            await replay([1], "", None, CALLER)
        return current_identity.get()

    assert asyncio.run(scenario()) == SYSTEM

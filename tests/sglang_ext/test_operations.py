"""What the operator may ask of the scheduler, and how a wrong question is answered."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.operations import OPERATIONS
from sglang_ext.patches.admin_channel import admin_channel_hooks
from tests.radix.caches import make_rig


class _Channel:
    """Stands for the socket to the tokenizer manager; keeps what was sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send_output(self, reply: Any, request: Any) -> None:
        self.sent.append(reply)


def _ask(name: str, body: dict[str, Any]) -> Any:
    """Send one request through the hook and return the reply."""
    channel = _Channel()
    scheduler = SimpleNamespace(
        tree_cache=make_rig().cache, ipc_channels=SimpleNamespace(send_to_tokenizer=channel)
    )
    (hook,) = admin_channel_hooks(OPERATIONS)
    hook.function(_original, scheduler, SimpleNamespace(method=name, body=body))
    (reply,) = channel.sent
    return reply


def _original(scheduler: Any, request: Any) -> None:
    scheduler.ipc_channels.send_to_tokenizer.send_output("stock", request)


def test_the_tree_is_described() -> None:
    reply = _ask("sglang_ext/tree", {"page": 0, "limit": 10})
    assert reply.success
    assert reply.response == [{"page": 0, "pages": 0, "runs_total": 0, "runs": [], "lower": []}]


@pytest.mark.parametrize(
    "body",
    [{}, {"page": -1, "limit": 1}, {"page": 0, "limit": 0}, {"page": "x", "limit": 1}],
    ids=str,
)
def test_a_wrong_question_is_refused_in_words(body: dict[str, Any]) -> None:
    reply = _ask("sglang_ext/tree", body)
    assert not reply.success
    assert "expected" in reply.error


def test_other_names_go_to_sglang() -> None:
    assert _ask("dump", {}) == "stock"


def test_an_unknown_operation_is_refused() -> None:
    reply = _ask("sglang_ext/no-such-thing", {})
    assert not reply.success
    assert "no-such-thing" in reply.error


def test_the_http_side_raises_what_the_scheduler_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.entrypoints import http_server

    from sglang_ext.patches.admin_channel import ask_schedulers

    class _Manager:
        async def dumper_control(self, request: Any) -> list[Any]:
            return [_ask(request.method, request.body)]

    state = SimpleNamespace(tokenizer_manager=_Manager())
    monkeypatch.setattr(http_server, "_global_state", state)
    assert asyncio.run(ask_schedulers("tree", {"page": 0, "limit": 1}))[0]["runs"] == []
    with pytest.raises(ValueError, match="limit"):
        asyncio.run(ask_schedulers("tree", {"page": 0, "limit": 0}))

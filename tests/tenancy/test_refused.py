"""A refusal by the scheduler reaches the client as a status, streamed or not."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from sglang_ext.tenancy.refused import note_refusal, serve

Send = Callable[[Any], Awaitable[None]]


async def _start(send: Send, status: int) -> None:
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": status, "headers": headers})


def _answer(app: Callable[[Any, Any, Any], Awaitable[None]]) -> list[Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("not read")

    asyncio.run(serve(app, {"type": "http"}, receive, send))
    return sent


def _app(before: int, refused: tuple[int, int] | None, *, in_task: bool = False) -> Any:
    async def refuse() -> None:
        if refused is not None:
            note_refusal(*refused)

    async def app(scope: Any, receive: Any, send: Send) -> None:
        await _start(send, before)
        await (asyncio.create_task(refuse()) if in_task else refuse())
        await send({"type": "http.response.body", "body": b"data: {}", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return app


@pytest.mark.parametrize("in_task", [False, True])
def test_a_stream_that_promised_200_says_429(in_task: bool) -> None:
    start, first, last = _answer(_app(200, (429, 7), in_task=in_task))
    assert start["status"] == 429
    assert (b"retry-after", b"7") in start["headers"]
    assert (first["body"], last["body"]) == (b"data: {}", b"")


def test_no_retry_where_it_would_not_help() -> None:
    start = _answer(_app(200, (400, 0)))[0]
    assert start["status"] == 400
    assert [name for name, _ in start["headers"]] == [b"content-type"]


def test_an_error_of_the_route_keeps_its_status() -> None:
    assert _answer(_app(500, (429, 1)))[0]["status"] == 500


def test_without_a_refusal_nothing_changes() -> None:
    start = _answer(_app(200, None))[0]
    assert (start["status"], len(start["headers"])) == (200, 1)


def test_nothing_is_sent_before_the_first_event() -> None:
    seen: list[list[Any]] = []
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, inner: Send) -> None:
        await _start(inner, 200)
        seen.append(list(sent))
        await inner({"type": "http.response.body", "body": b"x"})

    asyncio.run(serve(app, {}, None, send))  # type: ignore[arg-type]
    assert seen == [[]]
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]


def test_a_refusal_of_one_request_is_not_seen_by_the_next() -> None:
    assert _answer(_app(200, (429, 1)))[0]["status"] == 429
    assert _answer(_app(200, None))[0]["status"] == 200


def test_without_a_request_a_note_is_lost() -> None:
    note_refusal(429, 1)

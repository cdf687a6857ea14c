"""Requests and answers pass unchanged and at once; what cannot be answered is said, once."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import httpx
import pytest

from sglang_ext.gateway.relay import Failure
from tests.gateway.upstreams import SECRET, Echo, Scope, dead_url, engine, front, listening

START = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"100")]}


def _url(server: asyncio.Server) -> str:
    return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


def test_a_request_arrives_as_it_was_sent() -> None:
    async def test() -> None:
        echo = Echo()
        async with listening(echo) as url, front(engine("shared", url)) as gateway:
            answer = await gateway.send(
                "POST",
                "/v1/chat/completions?x=%2F%20&x=2",
                content=b"a" * 300_000,
                headers={"x-session-id": "chat", "connection": "x-hop", "x-hop": "1"},
            )
        got = answer.json()
        assert (got["method"], got["bytes"]) == ("POST", 300_000)
        assert (got["path"], got["query"]) == ("/v1/chat/completions", "x=%2F%20&x=2")
        headers = got["headers"]
        assert headers["authorization"] == "Bearer key-a"
        assert headers["x-session-id"] == "chat"
        # A redirect of the engine has to lead back here.
        assert headers["host"] == gateway.url.removeprefix("http://")
        assert headers["x-forwarded-for"] == "127.0.0.1"
        assert headers["x-sglang-ext-gateway"] == SECRET
        assert "x-hop" not in headers
        assert answer.headers.get_list("x-twice") == ["1", "2"]
        assert "x-private" not in answer.headers
        assert len(answer.headers.get_list("date")) == 1
        assert SECRET not in str(answer.headers)

    run(test)


def test_a_client_cannot_forge_what_the_gateway_says() -> None:
    async def test() -> None:
        echo = Echo()
        async with listening(echo) as url, front(engine("shared", url)) as gateway:
            forged = {"x-sglang-ext-gateway": "mine", "x-forwarded-for": "1.2.3.4"}
            await gateway.send("GET", "/v1/models", headers=forged)
        assert echo.seen[0]["headers"]["x-sglang-ext-gateway"] == SECRET
        assert echo.seen[0]["headers"]["x-forwarded-for"] == "127.0.0.1"

    run(test)


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_a_request_without_a_body(method: str) -> None:
    async def test() -> None:
        echo = Echo()
        async with listening(echo) as url, front(engine("shared", url)) as gateway:
            answer = await gateway.send(method, "/ext/v1/sessions/chat")
        assert answer.json()["bytes"] == 0
        assert answer.json()["method"] == method

    run(test)


def test_a_body_is_passed_on_while_it_is_still_sent() -> None:
    async def test() -> None:
        first_came = asyncio.Event()

        async def app(scope: Scope, receive: Any, send: Any) -> None:
            more = True
            while more:
                message = await receive()
                first_came.set()
                more = message.get("more_body", False)
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})

        async def parts() -> AsyncIterator[bytes]:
            yield b"one"
            await first_came.wait()
            yield b"two"

        async with listening(app) as url, front(engine("shared", url)) as gateway:
            answer = await gateway.send("POST", "/generate", content=parts())
        assert answer.status_code == 204

    run(test)


def test_a_stream_is_not_buffered() -> None:
    """The engine sends its second event only after the client has read the first."""

    async def test() -> None:
        was_read = asyncio.Event()

        async def app(scope: Scope, receive: Any, send: Any) -> None:
            headers = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
            await was_read.wait()
            await send({"type": "http.response.body", "body": b"data: 2\n\n"})

        async with listening(app) as url, front(engine("shared", url)) as gateway:
            headers = {"authorization": "Bearer key-a"}
            stream = gateway.client.stream("POST", gateway.url + "/generate", headers=headers)
            async with stream as answer:
                assert answer.headers["content-type"] == "text/event-stream"
                events = answer.aiter_raw()
                assert await anext(events) == b"data: 1\n\n"
                was_read.set()
                assert [event async for event in events] == [b"data: 2\n\n"]

    run(test)


@pytest.mark.parametrize("begun", [False, True], ids=["before the answer", "in the stream"])
def test_a_client_that_goes_takes_its_request_with_it(begun: bool) -> None:
    async def test() -> None:
        came, gone = asyncio.Event(), asyncio.Event()

        async def app(scope: Scope, receive: Any, send: Any) -> None:
            await receive()
            came.set()
            if begun:
                await send({**START, "headers": []})
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
            assert (await receive())["type"] == "http.disconnect"
            gone.set()

        async with listening(app) as url, front(engine("shared", url)) as gateway:
            task = asyncio.create_task(gateway.send("POST", "/generate", content=b"{}"))
            await came.wait()
            task.cancel()
            await gone.wait()
            assert not gateway.failures

    run(test)


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 503])
def test_an_engines_errors_are_the_clients(status: int) -> None:
    async def test() -> None:
        async def app(scope: Scope, receive: Any, send: Any) -> None:
            headers = [(b"retry-after", b"7"), (b"content-type", b"text/x-error")]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": b"because"})

        async with listening(app) as url, front(engine("shared", url)) as gateway:
            answer = await gateway.send("POST", "/v1/completions", content=b"{}")
        assert (answer.status_code, answer.content) == (status, b"because")
        assert answer.headers["retry-after"] == "7"
        assert answer.headers["content-type"] == "text/x-error"

    run(test)


def test_where_nothing_was_sent_the_next_engine_is_asked() -> None:
    async def test() -> None:
        echo = Echo()
        async with listening(echo) as url:
            engines = [engine("shared-0", dead_url()), engine("shared-1", url)]
            async with front(*engines) as gateway:
                for number in range(8):
                    headers = {"x-session-id": f"chat-{number}"}
                    answer = await gateway.send(
                        "POST", "/generate", content=b"a" * 200_000, headers=headers
                    )
                    assert answer.status_code == 200
                    assert answer.json()["bytes"] == 200_000
                assert set(gateway.failures) == {("shared-0", Failure.UNREACHABLE)}
        assert len(echo.seen) == 8

    run(test)


def _refuses_at_once() -> tuple[list[int], Any]:
    """Return how often it was asked, and an engine that ends when a request has come."""
    asked: list[int] = []

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        await receive()
        asked.append(1)

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.append(1)
        writer.close()

    return asked, cut


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "PUT"])
def test_what_was_sent_is_not_sent_again(method: str) -> None:
    async def test() -> None:
        asked, cut = _refuses_at_once()
        server = await asyncio.start_server(cut, "127.0.0.1", 0)
        url = _url(server)
        async with server, front(engine("shared-0", url), engine("shared-1", url)) as gateway:
            for count in range(1, 4):
                answer = await gateway.send(method, "/v1/models/m")
                assert answer.status_code == 502
                assert answer.json()["error"]["code"] == "bad_gateway"
                assert len(asked) == count
            assert {failure for _, failure in gateway.failures} == {Failure.BROKEN}

    run(test)


def test_a_connection_that_broke_while_idle_is_not_the_clients_trouble() -> None:
    """An engine that was started again: what is kept open to the old one is of no use."""

    async def test() -> None:
        async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(once, "127.0.0.1", 0)
        url = _url(server)
        async with server, front(engine("shared", url)) as gateway:
            for _ in range(20):
                answer = await gateway.send("POST", "/generate", content=b"{}")
                assert answer.content == b"ok"
                await asyncio.sleep(0)

    run(test)


def test_an_engine_that_ends_in_its_answer_is_noticed() -> None:
    async def test() -> None:
        async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(cut, "127.0.0.1", 0)
        url = _url(server)
        async with server, front(engine("shared", url)) as gateway:
            with pytest.raises(httpx.RemoteProtocolError):
                await gateway.send("POST", "/generate", content=b"{}")
            assert gateway.failures == [("shared", Failure.BROKEN)]

    run(test)


def test_an_engine_that_listens_and_is_not_ready_is_not_asked() -> None:
    async def test() -> None:
        echo = Echo()
        async with listening(echo) as url, front(engine("shared", url, ready=False)) as gateway:
            answer = await gateway.send("POST", "/generate", content=b"{}")
        assert answer.status_code == 503
        assert not echo.seen

    run(test)


@pytest.mark.parametrize(
    ("path", "where"),
    [
        ("/v1/chat/completions", ("error", "message")),
        ("/v1/messages", ("error", "message")),
        ("/api/chat", ("error",)),
    ],
)
def test_an_engine_that_does_not_run_is_said_in_the_routes_own_format(
    path: str, where: tuple[str, ...]
) -> None:
    async def test() -> None:
        async with front(engine("shared", dead_url(), ready=False)) as gateway:
            answer = await gateway.send("POST", path, content=b"{}")
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "5"
        value = answer.json()
        for name in where:
            value = value[name]
        assert "not running" in value

    run(test)


def test_many_at_once_each_get_their_own_answer() -> None:
    async def test() -> None:
        async def app(scope: Scope, receive: Any, send: Any) -> None:
            message = await receive()
            number = json.loads(message["body"])["number"]
            await asyncio.sleep(0.001 * (number % 7))
            body = b"%d" % number
            await send({**START, "headers": [(b"content-length", b"%d" % len(body))]})
            await send({"type": "http.response.body", "body": body})

        async with listening(app) as url, front(engine("shared", url)) as gateway:
            requests = [
                gateway.send("POST", "/generate", json={"number": number}) for number in range(200)
            ]
            answers = await asyncio.gather(*requests)
        assert [int(answer.content) for answer in answers] == list(range(200))

    run(test)

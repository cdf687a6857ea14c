"""Requests go where their text was sent before, of their own tenant's only, and nobody is told."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import pytest

from sglang_ext.gateway.prompt import MOST_BYTES
from tests.gateway.upstreams import Echo, Front, engine, front, listening

Test = Callable[[Front], Coroutine[Any, Any, None]]
NAMES = tuple(f"shared-{number}" for number in range(4))


def story(number: int) -> str:
    return f"Story {number}: " + "once upon a time " * 200


def four_engines(test: Test) -> None:
    async def run() -> None:
        async with AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(listening(Echo(name))) for name in NAMES]
            engines = [engine(name, url) for name, url in zip(NAMES, urls, strict=True)]
            await test(await stack.enter_async_context(front(*engines)))

    asyncio.run(asyncio.wait_for(run(), 30))


async def place_of(
    gateway: Front, text: str, key: str = "key-a", **headers: str
) -> tuple[str, dict[str, Any]]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = await gateway.send("POST", "/generate", key, json={"text": text}, headers=named)
    assert answer.status_code == 200
    return str(answer.json()["engine"]), dict(answer.headers)


async def elsewhere(gateway: Front, not_in: set[str]) -> tuple[str, str]:
    """Return a session whose home is none of these engines, and that engine."""
    for number in range(100):
        name, _ = await place_of(gateway, "hello", x_session_id=f"chat-{number}")
        if name not in not_in:
            return f"chat-{number}", name
    raise AssertionError(not_in)


def test_a_prompt_follows_what_was_sent_before() -> None:
    async def test(gateway: Front) -> None:
        home = (await place_of(gateway, story(0)))[0]
        session, warm = await elsewhere(gateway, {home})
        # A conversation stays at its home, and teaches where its text is.
        assert (await place_of(gateway, story(1), x_session_id=session))[0] == warm
        assert (await place_of(gateway, story(1) + " And then?"))[0] == warm
        assert (await place_of(gateway, story(2)))[0] == home

    four_engines(test)


@pytest.mark.trial(14)
def test_what_another_tenant_sent_attracts_nobody_and_shows_in_no_answer() -> None:
    async def test(gateway: Front) -> None:
        home, told = await place_of(gateway, story(0), "key-b")
        others = 0
        for number in range(12):
            # Wherever A's copies are, also where none of B's prompts ever was.
            for session in range(6):
                name, _ = await place_of(gateway, story(number), x_session_id=f"s{session}")
                others += name != home
            found, headers = await place_of(gateway, story(number), "key-b")
            assert found == home
            assert headers.keys() == told.keys()
        assert others > 0

    four_engines(test)


def test_a_flush_is_forgotten_here_too() -> None:
    async def test(gateway: Front) -> None:
        home = (await place_of(gateway, "x"))[0]
        session, warm = await elsewhere(gateway, {home})
        for number, (key, body, left) in enumerate(
            [("key-b", {}, warm), ("key-a", {}, home), ("key-admin", {"all": True}, home)]
        ):
            await place_of(gateway, story(number), x_session_id=session)
            assert (await place_of(gateway, story(number)))[0] == warm
            await gateway.send("POST", "/ext/v1/flush", key, json=body)
            assert (await place_of(gateway, story(number)))[0] == left

    four_engines(test)


@pytest.mark.parametrize(
    "headers", [{"cache_control": "no-store"}, {"x_kv_ttl": "500ms"}], ids=["no-store", "ttl"]
)
def test_what_leaves_no_pages_teaches_nothing(headers: dict[str, str]) -> None:
    async def test(gateway: Front) -> None:
        home = (await place_of(gateway, "x"))[0]
        session, _ = await elsewhere(gateway, {home})
        await place_of(gateway, story(6), x_session_id=session, **headers)
        assert (await place_of(gateway, story(6)))[0] == home

    four_engines(test)


@pytest.mark.parametrize("size", [0, 100, 70_000, MOST_BYTES, 2 * MOST_BYTES])
@pytest.mark.parametrize("in_parts", [False, True])
def test_every_body_arrives_whole(size: int, in_parts: bool) -> None:
    async def parts() -> Any:
        for start in range(0, size, 50_000):
            yield b"x" * min(50_000, size - start)
            await asyncio.sleep(0)

    async def test(gateway: Front) -> None:
        content = parts() if in_parts else b"x" * size
        answer = await gateway.send("POST", "/generate", content=content)
        assert answer.json()["bytes"] == size

    four_engines(test)


def test_a_client_that_goes_away_in_the_middle_is_no_failure() -> None:
    async def test(gateway: Front) -> None:
        host, port = gateway.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = "POST /generate HTTP/1.1\r\nhost: x\r\nauthorization: Bearer key-a\r\n"
        writer.write(f"{head}content-length: 100\r\n\r\nhalf".encode())
        await writer.drain()
        writer.close()
        await place_of(gateway, story(7))
        assert not gateway.failures

    four_engines(test)

"""An engine goes out of service: nothing new, what runs ends, conversations are written down."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from sglang_ext.gateway import draining
from sglang_ext.gateway.supervisor import Engine
from tests.gateway.upstreams import Front, Scope, dead_url, engine, front, listening

STORY = "once upon a time " * 200


class Node:
    """An engine with conversations. ``hold`` keeps a stream open; ``stuck`` cannot be moved."""

    def __init__(self, name: str, sessions: tuple[str, ...] = (), stuck: str = "") -> None:
        self.name = name
        self.sessions = sessions
        self.stuck = stuck
        self.hold = asyncio.Event()
        self.paused: list[tuple[str, str]] = []

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        body = (await receive()).get("body", b"")
        start = {"type": "http.response.start", "status": 200}
        headers = [(b"content-type", b"application/json")]
        await send({**start, "headers": headers})
        if scope["path"] == "/v1/completions":
            await send({"type": "http.response.body", "body": b" ", "more_body": True})
            await self.hold.wait()
        answer = json.dumps(self._answer(scope, body)).encode()
        await send({"type": "http.response.body", "body": answer})

    def _answer(self, scope: Scope, body: bytes) -> dict[str, Any]:
        path, query = scope["path"], scope["query_string"].decode()
        if path == "/ext/v1/sessions":
            page = int(query.partition("page=")[2].partition("&")[0])
            rows = [{"session": name} for name in self.sessions]
            size = draining._PAGE
            return {"sessions": rows[page * size : (page + 1) * size]}
        if path.endswith("/pause"):
            session = path.split("/")[-2]
            self.paused.append((session, json.loads(body)["to"]))
            return {"in_use": {"hbm_tokens": 16 if session == self.stuck else 0}}
        return {"engine": self.name}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pages, and a store that answers at once."""
    monkeypatch.setattr(draining, "_PAGE", 2)
    monkeypatch.setattr(draining, "_STORE_S", 0)
    monkeypatch.setattr(draining, "_LOOK_S", 0.01)


def run(test: Callable[[Front, Node, Node, list[Engine]], Awaitable[None]], **one: Any) -> None:
    async def scenario() -> None:
        nodes = (Node("one", **one), Node("two"))
        async with AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(listening(node)) for node in nodes]
            engines = [engine(node.name, url) for node, url in zip(nodes, urls, strict=True)]
            engines.append(engine("bank", dead_url(), tenant="bank"))
            await test(await stack.enter_async_context(front(*engines)), *nodes, engines)

    asyncio.run(asyncio.wait_for(scenario(), 30))


async def row(gateway: Front, name: str) -> dict[str, Any]:
    rows = (await gateway.send("GET", "/ext/v1/engines", "key-admin")).json()["engines"]
    return next(found for found in rows if found["engine"] == name)


async def order(gateway: Front, name: str, what: str, status: int = 200) -> dict[str, Any]:
    answer = await gateway.send("POST", f"/ext/v1/engines/{name}/{what}", "key-admin")
    assert answer.status_code == status, answer.text
    return dict(answer.json())


async def drained(gateway: Front, name: str) -> dict[str, Any]:
    while (found := (await row(gateway, name))["drain"])["state"] != "drained":
        await asyncio.sleep(0.01)
    return dict(found)


async def places(gateway: Front) -> set[str]:
    """Return who answers conversations and other prompts, those sent before too."""
    found = set()
    for number in range(12):
        for headers in ({}, {"x-session-id": f"chat-{number}"}):
            answer = await gateway.send(
                "POST", "/generate", json={"text": f"{number} {STORY}"}, headers=headers
            )
            found.add(answer.json()["engine"])
    return found


def test_nothing_new_goes_there_and_what_runs_ends() -> None:
    async def test(gateway: Front, one: Node, two: Node, engines: list[Engine]) -> None:
        assert await places(gateway) == {"one", "two"}
        sent = {"headers": {"authorization": "Bearer key-admin", "x-engine": "one"}}
        url = gateway.url + "/v1/completions"
        async with gateway.client.stream("POST", url, json={}, **sent) as stream:
            begun = await order(gateway, "one", "drain")
            assert (begun["drain"]["state"], begun["requests"]) == ("draining", 1)
            assert await places(gateway) == {"two"}
            await asyncio.sleep(0.05)
            assert (await row(gateway, "one"))["drain"]["state"] == "draining"
            one.hold.set()
            assert json.loads(await stream.aread()) == {"engine": "one"}
        await drained(gateway, "one")
        assert (await row(gateway, "one"))["requests"] == 0
        assert await places(gateway) == {"two"}
        # The operator still reaches it by name.
        answer = await gateway.send("GET", "/x", "key-admin", headers={"x-engine": "one"})
        assert answer.json() == {"engine": "one"}
        back = await order(gateway, "one", "resume")
        assert back["drain"] is None
        assert await places(gateway) == {"one", "two"}

    run(test)


def test_its_conversations_are_written_down() -> None:
    names = tuple(f"chat-{number}" for number in range(5))

    async def test(gateway: Front, one: Node, two: Node, engines: list[Engine]) -> None:
        await order(gateway, "one", "drain")
        found = await drained(gateway, "one")
        assert sorted(one.paused) == [(name, "nvme") for name in names]
        assert not two.paused
        note = "1 conversations are not in the store as a whole"
        assert found == {"state": "drained", "sessions": 5, "moved": 4, "note": note}

    run(test, sessions=names, stuck="chat-3")


def test_an_engine_that_ends_while_it_is_drained_is_drained() -> None:
    async def test(gateway: Front, one: Node, two: Node, engines: list[Engine]) -> None:
        engines[0].url = dead_url()
        engines[0].life.away()
        await order(gateway, "one", "drain")
        found = await drained(gateway, "one")
        assert "were not moved" in found["note"]
        ready = await gateway.send("GET", "/ready")
        assert (ready.status_code, ready.json()) == (200, {"engines": 3, "ready": 2})
        # It has nothing to say to what is asked of all, and a flush would leave its disk out.
        usage = await gateway.send("GET", "/ext/v1/usage")
        assert usage.json() == {"engine": "two"}
        flush = await gateway.send("POST", "/ext/v1/flush", json={})
        assert flush.status_code == 503

    run(test)


def test_the_last_engine_of_a_tenant_stays() -> None:
    async def test(gateway: Front, one: Node, two: Node, engines: list[Engine]) -> None:
        assert "no other engine" in (await order(gateway, "bank", "drain", 409))["message"]
        await order(gateway, "one", "drain")
        await order(gateway, "two", "drain", 409)
        await order(gateway, "one", "drain")
        assert (
            "expected one of one, two, bank" in (await order(gateway, "x", "drain", 404))["message"]
        )
        await order(gateway, "one", "resume")
        await order(gateway, "one", "resume")
        await order(gateway, "two", "drain")
        assert await places(gateway) == {"one"}

    run(test)


@pytest.mark.parametrize("what", ["drain", "resume"])
def test_only_the_operator_drains(what: str) -> None:
    async def test(gateway: Front, one: Node, two: Node, engines: list[Engine]) -> None:
        answer = await gateway.send("POST", f"/ext/v1/engines/one/{what}")
        assert answer.status_code == 403
        assert engines[0].drain is None

    run(test)

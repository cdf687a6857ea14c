"""Each request reaches its tenant's engine and no other; the operator sees all of them as one."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import pytest

from sglang_ext.gateway.life import Life, State
from sglang_ext.gateway.place import OnlyGateway, Place
from sglang_ext.gateway.plan import EngineSpec
from sglang_ext.gateway.policy_steps import STEP_ROUTE
from sglang_ext.gateway.supervisor import Engine
from tests.gateway.upstreams import SECRET, Echo, Front, Scope, dead_url, engine, front, listening

Test = Callable[[Front, Echo, Echo], Coroutine[Any, Any, None]]


def two_engines(test: Test) -> None:
    """Run ``test`` with the engines of the shared tenants and of ``bank``."""

    async def run() -> None:
        shared, bank = Echo("shared"), Echo("bank")
        async with AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(listening(echo)) for echo in (shared, bank)]
            engines = [engine("shared", urls[0]), engine("bank", urls[1], tenant="bank")]
            await test(await stack.enter_async_context(front(*engines)), shared, bank)

    asyncio.run(asyncio.wait_for(run(), 30))


PATHS = [
    *("/generate", "/v1/chat/completions", "/v1/models", "/abort_request", "/tokenize"),
    *("/ext/v1/usage", "/ext/v1/sessions", "/ext/v1/sessions/chat/pause", "/ext/v1/pins"),
]


@pytest.mark.parametrize("path", PATHS)
def test_a_tenants_bytes_reach_its_engine_only(path: str) -> None:
    async def test(gateway: Front, shared: Echo, bank: Echo) -> None:
        forged = {"x-engine": "bank", "x-tenant": "bank", "x-session-id": "bank"}
        for method in ("GET", "POST"):
            for key, name in (("key-a", "shared"), ("key-bank", "bank")):
                answer = await gateway.send(
                    method, f"{path}?tenant=bank&engine=bank", key, headers=forged
                )
                assert answer.json()["engine"] == name
        assert {got["headers"]["authorization"] for got in shared.seen} == {"Bearer key-a"}
        assert {got["headers"]["authorization"] for got in bank.seen} == {"Bearer key-bank"}

    two_engines(test)


def test_without_a_key_nothing_reaches_an_engine() -> None:
    async def test(gateway: Front, shared: Echo, bank: Echo) -> None:
        for headers in ({"authorization": ""}, {"authorization": f"Bearer {SECRET}"}):
            answer = await gateway.send("POST", "/generate", headers=headers)
            assert answer.status_code == 401
        assert (await gateway.send("GET", "/ext/v1/engines")).status_code == 403
        assert not shared.seen
        assert not bank.seen

    two_engines(test)


def test_the_steps_of_a_change_are_the_gateways_own() -> None:
    async def test(gateway: Front, shared: Echo, bank: Echo) -> None:
        for path in (STEP_ROUTE, STEP_ROUTE.replace("/policy", "%2Fpolicy")):
            for headers in ({}, {"x-engine": "bank"}):
                answer = await gateway.send("POST", path, "key-admin", headers=headers)
                assert answer.status_code == 404
        assert not shared.seen
        assert not bank.seen

    two_engines(test)


def test_an_open_route_tells_nothing_about_engines() -> None:
    async def test(gateway: Front, shared: Echo, bank: Echo) -> None:
        for name in ("bank", "no-such"):
            headers = {"authorization": "", "x-engine": name}
            answer = await gateway.send("GET", "/ext/ui", headers=headers)
            assert answer.json()["engine"] == "shared"
        health = await gateway.send("GET", "/health", headers={"authorization": ""})
        assert health.json() == {"engines": 2, "ready": 2}

    two_engines(test)


def test_the_operator_names_a_tenant_or_an_engine() -> None:
    async def test(gateway: Front, shared: Echo, bank: Echo) -> None:
        async def engine_of(method: str, path: str, **headers: str) -> str:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            answer = await gateway.send(method, path, "key-admin", headers=named)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["engine"])

        assert await engine_of("GET", "/ext/v1/sessions?tenant=bank") == "bank"
        assert await engine_of("POST", "/ext/v1/sessions/chat/close?tenant=bank") == "bank"
        assert await engine_of("GET", "/ext/v1/pins?tenant=a") == "shared"
        assert await engine_of("GET", "/server_info") == "shared"
        assert await engine_of("GET", "/server_info", x_engine="bank") == "bank"
        assert await engine_of("POST", "/update_weights_from_disk", x_engine="bank") == "bank"
        assert await engine_of("POST", "/generate") == "shared"

    two_engines(test)


def test_a_change_of_one_engine_needs_its_name() -> None:
    async def test(gateway: Front, shared: Echo, bank: Echo) -> None:
        answer = await gateway.send("POST", "/update_weights_from_disk", "key-admin")
        assert answer.status_code == 400
        assert "X-Engine (shared, bank)" in answer.text
        wrong = await gateway.send("GET", "/server_info", "key-admin", headers={"x-engine": "x"})
        assert wrong.status_code == 400
        assert not shared.seen
        assert not bank.seen

    two_engines(test)


class Answers:
    """Answers each path with data of its own."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[str] = []

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        import json

        name = scope["path"].strip("/").rpartition("/")[2]
        self.asked.append(name)
        found = self.answers.get(name)
        body = found.encode() if isinstance(found, str) else json.dumps(found).encode()
        kind = b"text/plain" if isinstance(found, str) else b"application/json"
        status = 404 if found is None else 200
        headers = [(b"content-type", kind)]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def with_answers(
    test: Callable[[Front], Coroutine[Any, Any, None]], shared: Answers, bank: Answers
) -> None:
    async def run() -> None:
        async with listening(shared) as one, listening(bank) as two:
            engines = [engine("shared", one), engine("bank", two, tenant="bank")]
            async with front(*engines) as gateway:
                await test(gateway)

    asyncio.run(asyncio.wait_for(run(), 30))


def test_the_operators_questions_are_asked_of_all() -> None:
    shared = Answers(
        usage={"tenants": {"a": {"sessions": 1}, "system": {"sessions": 0}}},
        tree={"ranks": [{"runs_total": 1}]},
        flush={"ranks": [{"freed": 1}]},
        metrics="# HELP x X.\n# TYPE x gauge\nx 1.0\n",
        export={"usage": ["whole file"]},
    )
    bank = Answers(
        usage={"tenants": {"bank": {"sessions": 2}, "system": {"sessions": 0}}},
        tree={"ranks": [{"runs_total": 5}]},
        flush={"ranks": [{"freed": 2}]},
        metrics='# HELP x X.\n# TYPE x gauge\nx{y="1"} 2.0\n',
        export={"usage": ["whole file"]},
    )

    async def test(gateway: Front) -> None:
        usage = (await gateway.send("GET", "/ext/v1/usage", "key-admin")).json()["tenants"]
        assert {name: row["sessions"] for name, row in usage.items()} == {
            "a": 1,
            "bank": 2,
            "system": 0,
        }
        tree = (await gateway.send("GET", "/ext/v1/tree", "key-admin")).json()
        assert tree["ranks"] == [
            {"engine": "shared", "runs_total": 1},
            {"engine": "bank", "runs_total": 5},
        ]
        bill = (await gateway.send("GET", "/ext/v1/usage/export", "key-admin")).json()
        assert bill == {"usage": ["whole file"]}
        assert (shared.asked.count("export"), bank.asked.count("export")) == (1, 1)
        page = (await gateway.send("GET", "/metrics", "key-admin")).text
        assert 'x{engine="shared"} 1.0\nx{engine="bank",y="1"} 2.0' in page
        everything = await gateway.send("POST", "/ext/v1/flush", "key-admin", json={"all": True})
        assert everything.json() == {
            "ranks": [{"engine": "shared", "freed": 1}, {"engine": "bank", "freed": 2}]
        }
        one = await gateway.send("POST", "/ext/v1/flush", "key-admin", json={"tenant": "bank"})
        assert one.json() == {"ranks": [{"engine": "bank", "freed": 2}]}
        assert (shared.asked.count("flush"), bank.asked.count("flush")) == (1, 2)

    with_answers(test, shared, bank)


def test_a_tenants_flush_reaches_its_engine_only() -> None:
    """Whatever it says; whether it may, the engine decides by its key."""
    shared, bank = Answers(flush={"ranks": [{}]}), Answers(flush={"ranks": [{}]})

    async def test(gateway: Front) -> None:
        for body in ({}, {"tenant": "a"}, {"tenant": "bank"}, {"all": True}):
            answer = await gateway.send("POST", "/ext/v1/flush", json=body)
            assert answer.json() == {"ranks": [{"engine": "shared"}]}
        assert (shared.asked, bank.asked) == (["flush"] * 4, [])
        await gateway.send("POST", "/ext/v1/flush", "key-bank", json={"all": True})
        assert (len(shared.asked), bank.asked) == (4, ["flush"])

    with_answers(test, shared, bank)


def test_a_refusal_of_one_engine_is_the_answer() -> None:
    async def test(gateway: Front) -> None:
        answer = await gateway.send("GET", "/ext/v1/tree", "key-admin")
        assert answer.status_code == 404

    with_answers(test, Answers(tree={"ranks": []}), Answers())


def test_where_an_engine_is_down_nothing_is_done_by_halves() -> None:
    async def run() -> None:
        shared = Answers(flush={"ranks": []}, flush_cache="done")
        async with listening(shared) as url:
            down = engine("bank", dead_url(), tenant="bank", ready=False)
            async with front(engine("shared", url), down) as gateway:
                for path in ("/ext/v1/flush", "/flush_cache"):
                    answer = await gateway.send("POST", path, "key-admin", json={"all": True})
                    assert answer.status_code == 503
                    assert "bank is not running" in answer.text
                assert not shared.asked
                health = await gateway.send("GET", "/health")
                ready = await gateway.send("GET", "/ready")
                assert (health.status_code, ready.status_code) == (200, 503)
                assert ready.json() == {"engines": 2, "ready": 1}
                rows = (await gateway.send("GET", "/ext/v1/engines", "key-admin")).json()
                states = {row["engine"]: row["state"] for row in rows["engines"]}
                assert states == {"shared": State.READY, "bank": State.WAITING}

    asyncio.run(asyncio.wait_for(run(), 30))


def test_an_engine_answers_its_gateway_only() -> None:
    async def run() -> None:
        place = Place("shared", 0, 1, 1, SECRET)
        echo = Echo("shared")
        guarded = OnlyGateway(echo, place, lambda key: key == "warm-up")
        async with listening(guarded) as url, front(engine("shared", url)) as gateway:
            assert (await gateway.send("GET", "/v1/models")).status_code == 200
            for headers, status in [
                ({}, 403),
                ({"authorization": "Bearer key-a"}, 403),
                ({"x-sglang-ext-gateway": "guess"}, 403),
                ({"x-sglang-ext-gateway": "\xff"}, 403),
                ({"authorization": "Bearer warm-up"}, 200),
                ({"x-sglang-ext-gateway": SECRET}, 200),
            ]:
                raw = {name: value.encode("latin-1") for name, value in headers.items()}
                answer = await gateway.client.get(url + "/v1/models", headers=raw)
                assert answer.status_code == status, headers

    asyncio.run(asyncio.wait_for(run(), 30))


def test_replicas_answer_a_tenant_as_one() -> None:
    async def run() -> None:
        rows = [{"session": "old", "idle_seconds": 9.0}, {"session": "new", "idle_seconds": 1.0}]
        engines = [
            Answers(sessions={"tenant": "a", "total": 1, "sessions": [row]}, pins={"removed": 2})
            for row in rows
        ]
        async with AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(listening(one)) for one in engines]
            replicas = [engine(f"shared-{place}", url) for place, url in enumerate(urls)]
            gateway = await stack.enter_async_context(front(*replicas))
            listed = (await gateway.send("GET", "/ext/v1/sessions")).json()
            assert listed == {"tenant": "a", "total": 2, "sessions": rows[::-1]}
            removed = await gateway.send("DELETE", "/ext/v1/pins")
            assert removed.json() == {"removed": 4}

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_node_that_is_off_keeps_nobody_from_asking_the_others() -> None:
    async def run() -> None:
        here = Answers(
            **{"usage": {"tenants": {"a": {"sessions": 1}}}, "abort_request": {}, "pins": {}}
        )
        async with listening(here) as url:
            spec = EngineSpec("n1", None, 0, 1, url=dead_url())
            away = Engine(spec, spec.url, Life(State.AWAY))
            async with front(engine("shared", url), away) as gateway:
                usage = await gateway.send("GET", "/ext/v1/usage")
                assert usage.json() == {"tenants": {"a": {"sessions": 1}}}
                assert (await gateway.send("POST", "/abort_request", json={})).status_code == 200
                for method, path in (("DELETE", "/ext/v1/pins"), ("POST", "/ext/v1/flush")):
                    answer = await gateway.send(method, path, json={})
                    assert answer.status_code == 503
                    assert "n1 is not running" in answer.text
                assert here.asked == ["usage", "abort_request"]
            other = EngineSpec("n2", None, 0, 1, url=dead_url())
            async with front(away, Engine(other, other.url, Life(State.AWAY))) as gateway:
                assert (await gateway.send("GET", "/ext/v1/usage")).status_code == 503

    asyncio.run(asyncio.wait_for(run(), 30))

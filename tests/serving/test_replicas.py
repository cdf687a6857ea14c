"""Two replicas behind one door: warm conversations, trials of isolation, one of them killed."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from sglang_ext.tenancy.keys import digest
from tests.serving.prompts import unique_prompt
from tests.serving.replicas import ENGINES, SYSTEM, Replicas, session_at, told
from tests.serving.server import Client, ServerProcess
from tests.serving.steady import BACK_SECONDS, Steady, until
from tests.serving.test_isolation import test_trial_19_no_store_leaves_nothing  # noqa: F401
from tests.serving.test_live_policy import COMING_AND_GOING, STABLE, change
from tests.serving.test_live_policy import Load as Changing
from tests.serving.tiered import LEAST, story, wait

pytestmark = pytest.mark.serving

CHANGES = int(os.environ.get("SGLANG_EXT_RELOADS", "20"))


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    """In the end what runs is answered whole, and no process and no leaked page is left."""
    replicas = Replicas(tmp_path_factory.mktemp("replicas"))
    try:
        replicas.server.wait_for("all 2 engines are ready: shared-0, shared-1")
        yield replicas
        _stop_with_a_request_in_flight(replicas)
        assert not replicas.server.leaks(), replicas.server.leaks()
    finally:
        replicas.server.kill()


def _stop_with_a_request_in_flight(replicas: Replicas) -> None:
    sampling = {"max_new_tokens": 24, "ignore_eos": True}
    body = {"text": "The last one:", "stream": True, "sampling_params": sampling}
    events = replicas.client("b").events("/generate", body)
    next(events)
    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(list, events)
        assert replicas.server.stop() == 0
    assert json.loads(rest.result()[-1])["meta_info"]["completion_tokens"] == 24


@pytest.fixture
def server(replicas: Replicas) -> ServerProcess:
    """What imported tests and the fixtures of all serving tests ask for."""
    return replicas.server


def test_a_conversation_has_one_home_and_hits_there_under_load(replicas: Replicas) -> None:
    talks = [(tenant, f"talk-{number}") for tenant in ("a", "sa") for number in range(6)]
    texts = {talk: unique_prompt(f"{talk}") for talk in talks}

    def turn(talk: tuple[str, str]) -> int:
        return told(replicas.client(talk[0]), texts[talk], talk[1])

    assert [turn(talk) for talk in talks] == [0] * len(talks)
    homes = {
        (tenant, name): [one for one in ENGINES if name in replicas.sessions(one, tenant)]
        for tenant, name in talks
    }
    assert all(len(home) == 1 for home in homes.values()), homes
    assert {home for (home,) in homes.values()} == set(ENGINES)
    for talk in talks:
        texts[talk] += " And then?"
    with ThreadPoolExecutor(len(talks)) as pool:
        assert min(pool.map(turn, talks)) >= 48
    for (tenant, name), (home,) in homes.items():
        assert [one for one in ENGINES if name in replicas.sessions(one, tenant)] == [home]


def test_other_requests_stay_together_until_their_engine_is_busy(replicas: Replicas) -> None:
    c, text = replicas.client("c"), unique_prompt("alone")
    cached = [told(c, text) for _ in range(4)]
    assert cached[0] == 0
    assert min(cached[1:]) >= 48
    (quiet,) = [name for name, tokens in replicas.held("c").items() if not tokens]
    sampling = {"max_new_tokens": 2000, "ignore_eos": True}
    long = {"text": "Go on:", "stream": True, "sampling_params": sampling}
    events = c.events("/generate", long)
    next(events)
    assert told(c, text) == 0
    assert replicas.held("c")[quiet] >= 48
    events.close()  # type: ignore[attr-defined]
    assert told(c, text) >= 48


def test_a_prompt_follows_its_text_to_where_a_conversation_left_it(replicas: Replicas) -> None:
    """Beside a conversation, a tenant's prompts have one home while nobody is busy."""
    b, c = replicas.client("b"), replicas.client("c")
    for engine in ENGINES:
        text = story(840 + ENGINES.index(engine))
        assert told(c, text, session_at("c", engine, "teach")) == 0
        assert told(c, text + " And then?") >= LEAST
        assert told(b, text + " And then?") == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_a_drained_replica_gets_nothing_new_and_comes_back(replicas: Replicas, engine: str) -> None:
    (left,) = set(ENGINES) - {engine}
    a, admin = replicas.client("a"), replicas.client("admin")
    text, chat = story(850 + ENGINES.index(engine)), session_at("a", engine, "drain")

    def row() -> dict[str, Any]:
        return replicas.engines()[engine]

    assert told(a, text, chat) == 0
    sampling = {"max_new_tokens": 60, "ignore_eos": True}
    body = {"text": "Go on:", "stream": True, "sampling_params": sampling}
    events = admin.events("/generate", body, x_engine=engine)
    next(events)
    begun = admin.post(f"/ext/v1/engines/{engine}/drain", None).json()
    assert begun["drain"]["state"] == "draining"
    assert told(a, text, chat) == 0
    assert chat in replicas.sessions(left, "a")
    rest = json.loads(list(events)[-1])
    assert rest["meta_info"]["completion_tokens"] == 60
    wait(lambda: row()["drain"]["state"] == "drained")
    assert row()["requests"] == 0
    assert "computed again" in row()["drain"]["note"]
    assert admin.get("/ready").json() == {"engines": 2, "ready": 1}
    assert admin.post(f"/ext/v1/engines/{left}/drain", None).status_code == 409
    assert admin.post(f"/ext/v1/engines/{engine}/resume", None).json()["drain"] is None
    assert told(a, text, chat) >= LEAST


def test_a_flush_reaches_both_and_a_tenant_flushes_itself_only(replicas: Replicas) -> None:
    a, b = replicas.client("a"), replicas.client("b")
    text = unique_prompt("flush both")

    def ask() -> list[int]:
        homes = [
            (client, session_at(name, engine, "flush"))
            for client, name in ((a, "a"), (b, "b"))
            for engine in ENGINES
        ]
        return [told(client, text, session) for client, session in homes]

    ask()
    assert min(ask()) >= 48
    for body in ({"tenant": "b"}, {"all": True}):
        assert a.post("/ext/v1/flush", body).status_code == 403
    answer = a.post("/ext/v1/flush", {})
    assert answer.status_code == 200, answer.text
    assert [rank["engine"] for rank in answer.json()["ranks"]] == list(ENGINES)

    def is_gone() -> bool:
        """A copy on its way down holds its page for a moment."""
        again = a.post("/ext/v1/flush", {}).json()["ranks"]
        return not any(count for rank in again for count in rank["in_use"].values())

    wait(is_gone)
    cached = ask()
    assert max(cached[:2]) == 0
    assert min(cached[2:]) >= 48


def test_a_change_of_the_policy_reaches_both(replicas: Replicas) -> None:
    """Over HTTP, and at SIGHUP; who leaves is gone from both."""
    admin, server = replicas.client("admin"), replicas.server

    def new_tenant_is_served(name: str) -> None:
        client, text = replicas.client(name), unique_prompt(f"come {name}")
        for engine in ENGINES:
            assert name in admin.get("/ext/v1/usage", x_engine=engine).json()["tenants"]
            assert told(client, text, session_at(name, engine, "new")) == 0
        assert min(replicas.held(name).values()) >= 48

    added = admin.put("/ext/v1/tenants/new", {"api_keys": [digest("key-new")]})
    assert added.status_code == 200, added.text
    new_tenant_is_served("new")
    wait(lambda: replicas.stored_tokens("new") > 0)
    both = sum(replicas.held("new", frozenset({"hbm"})).values())
    pages = admin.delete("/ext/v1/tenants/new").json()["removed"]["owners"]["t:new"]
    assert pages["freed"]["hbm_tokens"] >= both
    assert pages["freed"]["nvme_bytes"] > 0
    assert sum(pages["left"].values()) == 0
    assert replicas.client("new").get("/v1/models").status_code == 401
    text = replicas.policy.read_text(encoding="utf-8")
    late = f'tenants:\n  late: {{api_keys: ["{digest("key-late")}"]}}\n'
    replicas.policy.write_text(text.replace("tenants:\n", late, 1), encoding="utf-8")
    os.kill(server.pid, signal.SIGHUP)
    server.wait_for("policy file read again")
    new_tenant_is_served("late")


@pytest.mark.trial(5)
@pytest.mark.trial(6)
@pytest.mark.trial(18)
@pytest.mark.parametrize(("mine", "other"), [("a", "b"), ("sa", "sb")])
def test_what_went_down_to_one_disk_comes_back_there_to_its_tenant_alone(
    replicas: Replicas, mine: str, other: str
) -> None:
    """Each engine has a folder of its own, and the same text has other names for each owner."""
    home, away = ENGINES
    owner, others = replicas.client(mine), replicas.client(other)
    text, chat = story(800), session_at(mine, home, "disk")
    assert told(owner, text, chat) == 0
    wait(lambda: replicas.sessions(home, mine)[chat]["nvme_tokens"] >= LEAST)
    wait(lambda: _is_put_away(owner, chat))
    assert [replicas.sessions(home, mine)[chat][f"{tier}_tokens"] for tier in ("hbm", "cpu")] == [
        0,
        0,
    ]
    for engine in ENGINES:
        assert told(others, text, session_at(other, engine, "disk")) == 0
    assert told(owner, text, session_at(mine, away, "disk")) == 0
    back = owner.post(f"/ext/v1/sessions/{chat}/resume", None).json()
    assert back["nvme_tokens"] >= LEAST, back
    assert told(owner, text, chat) >= LEAST
    level = "s" if mine == "sa" else "t"
    for engine in ENGINES:
        names = [f"{level}:{tenant}" for tenant in (mine, other)]
        wait(lambda names=names, engine=engine: set(names) <= set(replicas.stored(engine)))
        keys = [replicas.stored(engine)[name] for name in names]
        assert not keys[0] & keys[1]


def _is_put_away(client: Client, session: str) -> bool:
    """Move a conversation to the disk; tell whether all of it could be moved."""
    answer = client.post(f"/ext/v1/sessions/{session}/pause", {"to": "nvme"})
    assert answer.status_code == 200, answer.text
    return not any(answer.json()["in_use"].values())


@pytest.mark.trial(20)
@pytest.mark.parametrize("tenant", ["brief", "sbrief"])
def test_pages_leave_every_tier_of_both_at_their_time(replicas: Replicas, tenant: str) -> None:
    client, text = replicas.client(tenant), story(810)
    chats = [session_at(tenant, engine, "ttl") for engine in ENGINES]
    assert [told(client, text, chat) for chat in chats] == [0, 0]
    wait(lambda: not any(replicas.held(tenant).values()))
    wait(lambda: replicas.stored_tokens(tenant) == 0)
    assert [told(client, text, chat) for chat in chats] == [0, 0]


@pytest.mark.trial(20)
@pytest.mark.parametrize("tenant", ["b", "sb"])
def test_a_client_shortens_the_life_of_its_pages_in_both(replicas: Replicas, tenant: str) -> None:
    client, text = replicas.client(tenant), story(820)
    chats = {engine: session_at(tenant, engine, "life") for engine in ENGINES}

    def is_over(engine: str) -> bool:
        row = replicas.sessions(engine, tenant).get(chats[engine], {})
        return not any(row.get(f"{tier}_tokens") for tier in ("hbm", "cpu", "nvme"))

    for chat in chats.values():
        assert told(client, text, chat, x_kv_ttl="500ms") == 0
    wait(lambda: all(map(is_over, ENGINES)))
    assert [told(client, text, chat) for chat in chats.values()] == [0, 0]


@pytest.mark.trial(21)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_public_prefix_hits_and_the_private_tail_never(replicas: Replicas, engine: str) -> None:
    def ask(tenant: str, text: str) -> int:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
        body = {"model": "m", "messages": messages, "max_tokens": 1, "temperature": 0}
        named = {"x_session_id": session_at(tenant, engine, "public")}
        answer = replicas.client(tenant).post("/v1/chat/completions", body, **named)
        answer.raise_for_status()
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    text = unique_prompt(f"public {engine}")
    ask("c", "warm")
    public = [ask(tenant, text) for tenant in ("a", "b")]
    assert public[0] == public[1] >= 48
    assert [ask(tenant, text) for tenant in ("sa", "sb")] == [0, 0]
    again = [ask(tenant, text) for tenant in ("a", "b", "sa", "sb")]
    assert min(again) >= public[0] + 48


@pytest.mark.trial(26)
def test_trial_26_changes_under_load_lose_no_request_and_no_page_in_either(
    replicas: Replicas,
) -> None:
    async def scenario() -> Changing:
        async with httpx.AsyncClient(base_url=replicas.server.url, timeout=180) as client:
            load = Changing(client)
            running = [asyncio.create_task(load.run(name)) for name in STABLE]
            for number in range(CHANGES):
                await change(client, load, number)
            load.stopped = True
            await asyncio.gather(*running)
            return load

    load = asyncio.run(scenario())
    admin = replicas.client("admin")
    for name in COMING_AND_GOING:
        admin.delete(f"/ext/v1/tenants/{name}")
        assert not any(replicas.held(name).values()), "a page was left behind"
    print(f"{CHANGES} changes, {load.served.total()} requests, all answered")
    assert min(load.served[name] for name in (*STABLE, *COMING_AND_GOING)) > 0
    held = {name: replicas.held(name, frozenset({"hbm"})) for name in STABLE}
    for engine in ENGINES:
        usage = admin.get("/ext/v1/usage", x_engine=engine).json()["tenants"]
        assert not set(usage) & set(COMING_AND_GOING)
        for name in STABLE:
            assert usage[name]["tiers"]["hbm"]["held_tokens"] == held[name][engine]


def test_a_killed_replica_takes_along_what_it_was_at_and_no_more(replicas: Replicas) -> None:
    asyncio.run(_kill_under_load(replicas))


async def _kill_under_load(replicas: Replicas) -> None:
    """Kill ``gone`` with conversations at home in both; each tenant has some in either."""
    gone, left = ENGINES
    first = psutil.Process(replicas.engines()[gone]["pid"])
    family = [first, *first.children(recursive=True)]
    a, text, chat = replicas.client("a"), story(830), session_at("a", gone, "kill")
    told(a, text, chat)
    wait(lambda: replicas.sessions(gone, "a")[chat]["nvme_tokens"] >= LEAST)
    there, here = Steady(replicas.server.url), Steady(replicas.server.url)
    async with httpx.AsyncClient(timeout=120) as client:
        tasks = [
            asyncio.create_task(load.run(client, tenant, session_at(tenant, home, "kill")))
            for load, home in ((here, left), (there, gone))
            for tenant in ("b", "sb")
        ]
        both = (here, there)
        await until(lambda: min(load.served[name] for load in both for name in ("b", "sb")) >= 3)
        killed, counts = time.monotonic(), (here.served.total(), there.served.total())
        first.kill()
        await until(lambda: here.served.total() > counts[0] + 10)
        # Its conversations go on in the other one, long before it is back.
        await until(lambda: there.served.total() > counts[1] + 10)
        assert replicas.engines()[gone]["state"] != "ready"
        assert await asyncio.to_thread(told, a, text, chat) == 0
        assert chat in await asyncio.to_thread(replicas.sessions, left, "a")
        await until(lambda: replicas.engines()[gone]["state"] == "ready")
        back = time.monotonic() - killed
        for load in both:
            load.stopped = True
        await asyncio.gather(*tasks)
    print(f"back after {back:.1f} s; {there.failed} of {there.served.total()} failed")
    assert not here.failed, here.failed
    assert len(there.failed) <= 2, "at most what each tenant had there at that moment"
    assert all(": 502" in problem or "Remote" in problem for problem in there.failed)
    assert back < BACK_SECONDS
    rows: dict[str, Any] = replicas.engines()
    assert (rows[gone]["restarts"], rows[left]["restarts"]) == (1, 0)
    assert not [one for one in family if one.is_running() and one.status() != "zombie"]
    # At home again, with what its disk kept.
    resumed = told(a, text, chat)
    assert chat in replicas.sessions(gone, "a")
    assert resumed >= LEAST

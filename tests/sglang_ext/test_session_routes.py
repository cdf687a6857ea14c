"""The routes of conversations: who may ask for whose, and what is answered."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from sglang_ext import callers, http_routes, session_routes
from sglang_ext.radix.sessions import SessionId
from sglang_ext.request_tag import RequestTag
from sglang_ext.tenancy.identity import Identity
from sglang_ext.types import Owner, TenantId
from tests.sglang_ext.live import Rank, Server, forget_policy

TEXT = [7] * 16


class World:
    """A server with two replicas; ``replayed`` are the requests that resuming made."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        forget_policy(monkeypatch)
        monkeypatch.setattr(session_routes, "_WAIT_S", 0.2)
        self.server = Server(folder, ranks=2)
        self.replayed: list[tuple[list[int], str, str | None, Identity]] = []
        monkeypatch.setattr(callers, "ask_schedulers", self.server.ask)
        for module in (session_routes, http_routes):
            self.server.app.include_router(module.router)
        monkeypatch.setattr(session_routes, "replay", self.replay)
        monkeypatch.setattr(http_routes, "tokenize", self.tokenize)

    async def replay(self, *request: Any) -> dict[str, int]:
        self.replayed.append(request)
        return {"hbm_tokens": 4, "cpu_tokens": 12, "nvme_tokens": 0, "computed_tokens": 0}

    async def tokenize(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def ask(self, tenant: str, owner: str, name: str, rank: int, text: list[int] = TEXT) -> None:
        """Let a request of a session end on one replica."""
        rig = self.rank(rank).rig
        rig.insert(text, owner)
        node = rig.core.node_by_id(rig.match(text, owner).last_device_node)
        id = SessionId(TenantId(tenant), name)
        rig.cache.sessions.use(id, Owner(owner), node, rig.cache.clock.now_ms)

    def rank(self, number: int) -> Rank:
        return self.server.ranks[number]

    def post(self, path: str, key: str = "key-a", body: object = None) -> httpx.Response:
        return self.server.call("POST", f"/ext/v1{path}", key, json=body)

    def get(self, path: str, key: str = "key-a") -> httpx.Response:
        return self.server.call("GET", f"/ext/v1{path}", key)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_a_tenant_lists_its_own_sessions_and_the_operator_anybodys(world: World) -> None:
    world.ask("a", "t:a", "s", 0)
    world.ask("b", "g:team", "s", 1)
    mine = world.get("/sessions").json()
    assert (mine["tenant"], mine["total"]) == ("a", 1)
    (row,) = mine["sessions"]
    assert (row["session"], row["hbm_tokens"], row["cpu_tokens"]) == ("s", 16, 0)
    assert world.get("/sessions", "key-c").json()["sessions"] == [], "of its group, but not its own"
    assert world.get("/sessions?tenant=b", "key-admin").json()["total"] == 1
    assert world.get("/sessions", "key-admin").json()["tenant"] == "system"
    assert world.get("/sessions?tenant=b").status_code == 403
    assert world.get("/sessions?tenant=a").status_code == 200
    assert world.get("/sessions?tenant=nobody", "key-admin").status_code == 400
    assert world.get("/sessions", "key-wrong").status_code == 401


def test_pages_of_the_list_begin_with_the_last_used(world: World) -> None:
    for number in range(5):
        world.ask("a", "t:a", f"s{number}", 0, [number] * 8)
    names = [
        [row["session"] for row in world.get(f"/sessions?limit=2&page={page}").json()["sessions"]]
        for page in range(3)
    ]
    assert names == [["s4", "s3"], ["s2", "s1"], ["s0"]]


@pytest.mark.parametrize("method", ["close", "delete"])
def test_closing_frees_on_every_replica_and_is_written_down(world: World, method: str) -> None:
    world.ask("a", "t:a", "s", 0)
    world.ask("a", "t:a", "s", 1)
    if method == "close":
        answer = world.post("/sessions/s/close")
    else:
        answer = world.server.call("DELETE", "/ext/v1/sessions/s", "key-a")
    assert answer.status_code == 200
    assert answer.json()["freed"]["hbm_tokens"] == 32
    assert answer.json()["in_use"] == {"hbm_tokens": 0, "cpu_tokens": 0}
    assert world.get("/sessions").json()["total"] == 0
    assert '"of": "a/s"' in world.server.audit.read_text()
    again = world.post("/sessions/s/close")
    assert again.status_code == 404
    assert "no such session" in again.text


def test_what_is_in_use_is_said_and_the_session_stays_known(world: World) -> None:
    world.ask("a", "t:a", "s", 0)
    rig = world.rank(0).rig
    lock = rig.cache.lock(rig.match(TEXT).last_device_node)
    assert world.post("/sessions/s/close").json()["in_use"]["hbm_tokens"] == 16
    rig.cache.unlock(lock)
    assert world.post("/sessions/s/close").json()["freed"]["hbm_tokens"] == 16


@pytest.mark.parametrize("action", ["pause", "resume", "close"])
def test_a_foreign_session_is_answered_like_none(world: World, action: str) -> None:
    world.ask("a", "t:a", "s", 0)
    foreign, unknown = (world.post(f"/sessions/{name}/{action}", "key-b") for name in ("s", "x"))
    assert foreign.status_code == unknown.status_code == 404
    assert foreign.content == unknown.content
    assert world.post(f"/sessions/s/{action}?tenant=a", "key-b").status_code == 403
    assert world.post(f"/sessions/s/{action}", "key-admin").status_code == 404
    assert world.post(f"/sessions/s/{action}?tenant=a", "key-admin").status_code == 200


def test_pausing_without_a_lower_tier_moves_nothing_and_says_so(world: World) -> None:
    world.ask("a", "t:a", "s", 0)
    answer = world.post("/sessions/s/pause").json()
    assert not any(answer["freed"].values())
    assert "nothing was moved: this server has no tier below HBM" in answer["note"]
    assert world.get("/sessions").json()["sessions"][0]["hbm_tokens"] == 16


@pytest.mark.parametrize("to", ["hbm", "remote", "tape", 5])
def test_a_wrong_destination_is_refused(world: World, to: object) -> None:
    world.ask("a", "t:a", "s", 0)
    assert world.post("/sessions/s/pause", body={"to": to}).status_code in {400, 422}


def test_resuming_replays_the_text_as_the_tenant(world: World) -> None:
    world.ask("a", "t:a", "s", 1)
    answer = world.post("/sessions/s/resume?tenant=a", "key-admin").json()
    assert (answer["hbm_tokens"], answer["cpu_tokens"], answer["note"]) == (4, 12, None)
    ((tokens, client_key, salt, identity),) = world.replayed
    assert (tokens, client_key, salt) == (TEXT, "", None)
    assert (identity.tenant, identity.owner, identity.tag) == ("a", "t:a", RequestTag("s"))


def test_a_text_that_left_every_tier_is_not_replayed(world: World) -> None:
    world.ask("a", "t:a", "s", 0)
    world.rank(0).rig.evict(1000)
    answer = world.post("/sessions/s/resume").json()
    assert "no tier holds anything" in answer["note"]
    assert not world.replayed


def test_the_operator_flushes_a_session_or_a_prefix(world: World) -> None:
    world.ask("a", "t:a", "s", 0)
    world.ask("a", "t:a", "u", 0, [8] * 8)
    world.rank(0).rig.insert(TEXT, "g:team")

    def freed(**body: object) -> int:
        answer = world.post("/flush", "key-admin", {"tenant": "a", **body})
        assert answer.status_code == 200, answer.text
        return sum(rank["freed"]["hbm_tokens"] for rank in answer.json()["ranks"])

    assert freed(session="nobody") == 0
    assert freed(session="u") == 8
    assert freed(prefix=[7, 7], cache_salt="other") == 0
    assert freed(prefix="7 7 7") == 16
    assert world.rank(0).rig.hit(TEXT, "g:team") == 16


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"tenant": "a", "prefix": 5}, "prefix: expected text"),
        ({"tenant": "a", "prefix": ["x"]}, "prefix: expected text"),
        ({"tenant": "a", "prefix": []}, "no whole page"),
        ({"tenant": "a", "prefix": [1], "cache_salt": 5}, "cache_salt: expected text"),
        ({"tenant": "a", "prefix": [1], "session": "s"}, "expected one of the policy file"),
        ({"tenant": "a", "prefixes": [1]}, "prefixes: no such field"),
        ({"all": True, "session": "s"}, "expected one of the policy file"),
    ],
    ids=str,
)
def test_a_wrong_flush_is_refused_in_words(world: World, body: object, words: str) -> None:
    answer = world.post("/flush", "key-admin", body)
    assert answer.status_code == 400
    assert words in answer.text

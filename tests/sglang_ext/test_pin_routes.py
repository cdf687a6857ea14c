"""Pinning through HTTP: within the tenant's quota, with a word on what did not fit (37, 38)."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from sglang_ext import callers, pin_routes
from sglang_ext.tenancy.keys import digest
from sglang_ext.types import Owner, Tier
from tests.sglang_ext.live import Server, forget_policy

POLICY = f"""version: 1
admin_keys: ["{digest("key-admin")}"]
tenants:
  a: {{api_keys: ["{digest("key-a")}"], quota: {{hbm: 24tok}}}}
  b: {{api_keys: ["{digest("key-b")}"]}}
"""
TEXT = [7] * 16


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    forget_policy(monkeypatch)
    server = Server(tmp_path, POLICY)

    async def tokenize(text: str) -> list[int]:
        return [int(word) for word in text.split()]

    monkeypatch.setattr(callers, "ask_schedulers", server.ask)
    monkeypatch.setattr(pin_routes, "tokenize", tokenize)
    server.app.include_router(pin_routes.router)
    return server


def call(server: Server, method: str, key: str = "key-a", **request: Any) -> httpx.Response:
    return server.call(method, "/ext/v1/pins", key, **request)


def protected(server: Server, owner: str = "t:a") -> int:
    return server.ranks[0].rig.cache.ledger.usage(Owner(owner), Tier.HBM).protected


@pytest.mark.trial(37)
def test_over_budget_the_answer_says_how_much_is_pinned(server: Server) -> None:
    rig = server.ranks[0].rig
    rig.insert(TEXT, "t:a")
    rig.insert([8] * 16, "t:a")
    first = call(server, "POST", json={"prefix": "7 " * 16}).json()["replicas"][0]
    assert (first["pinned_tokens"], first["cached_tokens"], first["note"]) == (16, 16, None)
    second = call(server, "POST", json={"prefix": [8] * 16}).json()["replicas"][0]
    assert (second["pinned_tokens"], second["cached_tokens"]) == (8, 16)
    assert second["note"].startswith("only 8 of 16 tokens fit")
    (shown,) = call(server, "GET").json()["replicas"]
    assert shown == {"all_pinned_tokens": 24, "quota_tokens": 24}
    rig.evict(1000)
    assert (rig.hit(TEXT), rig.hit([8] * 16)) == (16, 8)


@pytest.mark.trial(38)
def test_all_pins_of_a_tenant_are_undone_at_once_and_nobody_elses(server: Server) -> None:
    rig = server.ranks[0].rig
    for owner, key in (("t:a", "key-a"), ("t:b", "key-b")):
        rig.insert(TEXT, owner)
        for text in (TEXT, TEXT[:8]):
            assert call(server, "POST", key, json={"prefix": text}).status_code == 200
    assert call(server, "DELETE").json() == {"tenant": "a", "removed": 2}
    assert (protected(server), protected(server, "t:b")) == (0, 16)
    assert call(server, "DELETE", "key-admin", params={"tenant": "b"}).json()["removed"] == 2
    assert protected(server, "t:b") == 0


@pytest.mark.trial(37)
def test_a_pin_ends_by_itself(server: Server) -> None:
    cache = server.ranks[0].rig.cache
    server.ranks[0].rig.insert(TEXT, "t:a")
    now = [cache.clock.now_ms]
    cache.clock._read = lambda: now[0]
    call(server, "POST", json={"prefix": TEXT, "ttl": "2s"})
    now[0] += 1999
    cache.tick()
    assert protected(server) == 16
    now[0] += 1
    cache.tick()
    assert protected(server) == 0


def test_what_is_not_cached_is_not_pinned(server: Server) -> None:
    (answer,) = call(server, "POST", json={"prefix": TEXT}).json()["replicas"]
    assert answer["pinned_tokens"] == 0
    assert "send it once as a prompt" in answer["note"]


@pytest.mark.parametrize(
    "body",
    [{}, {"prefix": 5}, {"prefix": [-1]}, {"prefix": TEXT, "ttl": "soon"}, {"prefix": "1", "x": 1}],
    ids=str,
)
def test_a_wrong_pin_is_refused(server: Server, body: object) -> None:
    assert call(server, "POST", json=body).status_code in {400, 422}


def test_a_tenant_names_nobody_else(server: Server) -> None:
    for method in ("GET", "DELETE"):
        assert call(server, method, params={"tenant": "b"}).status_code == 403

"""Conversations, shorter lives, flushed prefixes and pins, on the server with three tiers."""

import time
from typing import Any

import httpx
import pytest

from tests.serving.server import Client
from tests.serving.tiered import LEAST, Tiers, ask, flood, story, wait

pytestmark = pytest.mark.serving


def told(client: Client, number: int, **headers: str) -> int:
    """Tell a story with headers; return how many of its tokens were cached."""
    body = {"text": story(number), "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    answer = client.post("/generate", body, **headers)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["meta_info"]["cached_tokens"])


def session(client: Client, action: str, body: object = None) -> dict[str, Any]:
    answer = client.post(f"/ext/v1/sessions/chat:1/{action}", body)
    assert answer.status_code == 200, answer.text
    done = answer.json()
    assert isinstance(done, dict)
    return done


def listed(client: Client) -> dict[str, dict[str, Any]]:
    answer = client.get("/ext/v1/sessions")
    assert answer.status_code == 200, answer.text
    return {row["session"]: row for row in answer.json()["sessions"]}


def held_by(client: Client, name: str) -> dict[str, int]:
    """Return the tokens of a session by tier, nothing for one that is over."""
    row = listed(client).get(name, {})
    return {key: int(row[key]) for key in row if key.endswith("_tokens")}


@pytest.mark.trial(39)
def test_a_session_moves_down_and_up_and_leaves_every_tier_when_it_is_closed(tiers: Tiers) -> None:
    c = tiers.client("c")
    told(c, 50, X_Session_Id="chat:1")
    told(c, 51, X_Session_Id="other")
    wait(lambda: listed(c)["chat:1"]["nvme_tokens"] >= LEAST)
    assert listed(c)["chat:1"]["hbm_tokens"] >= LEAST

    paused = session(c, "pause")
    assert paused["freed"]["hbm_tokens"] >= LEAST
    assert paused["freed"]["hbm_bytes"] > 0
    assert not any(paused["in_use"].values())
    assert listed(c)["chat:1"]["hbm_tokens"] == 0
    assert listed(c)["chat:1"]["cpu_tokens"] >= LEAST
    up = session(c, "resume")
    assert up["cpu_tokens"] >= LEAST
    assert up["computed_tokens"] <= 16
    assert listed(c)["chat:1"]["hbm_tokens"] >= LEAST

    down = session(c, "pause", {"to": "nvme"})
    assert down["freed"]["cpu_tokens"] >= LEAST
    assert [listed(c)["chat:1"][f"{tier}_tokens"] for tier in ("hbm", "cpu")] == [0, 0]
    assert session(c, "resume")["nvme_tokens"] >= LEAST
    assert told(c, 50, X_Session_Id="chat:1") >= LEAST

    wait(lambda: not any(session(c, "pause")["in_use"].values()))
    disk = listed(c)["chat:1"]["nvme_tokens"]
    closed = session(c, "close")
    assert closed["freed"]["cpu_tokens"] >= LEAST
    assert closed["freed"]["nvme_bytes"] > 0
    assert disk >= LEAST
    assert "chat:1" not in listed(c)
    assert "other" in listed(c)
    assert told(c, 50) == 0
    assert told(c, 51) >= LEAST, "the other conversation is there"


def test_a_session_of_another_tenant_looks_like_none(tiers: Tiers) -> None:
    b, c, admin = (tiers.client(name) for name in ("b", "c", "admin"))
    told(c, 52, X_Session_Id="chat:1")
    answers = [
        b.post(f"/ext/v1/sessions/{name}/{action}", None)
        for name in ("chat:1", "nobody")
        for action in ("pause", "resume", "close")
    ]
    assert {answer.status_code for answer in answers} == {404}
    assert len({answer.text for answer in answers}) == 1
    assert listed(b) == {}
    assert b.get("/ext/v1/sessions?tenant=c").status_code == 403
    assert b.post("/ext/v1/sessions/a%20b/close", None).status_code == 400
    shown = admin.get("/ext/v1/sessions?tenant=c").json()
    assert "chat:1" in {row["session"] for row in shown["sessions"]}
    closed = admin.post("/ext/v1/sessions/chat:1/close?tenant=c", None)
    assert closed.json()["freed"]["hbm_tokens"] >= LEAST
    assert told(c, 52) == 0


@pytest.mark.trial(20)
@pytest.mark.trial(38)
def test_a_client_shortens_the_life_of_its_pages_and_no_more(tiers: Tiers) -> None:
    c, short = tiers.client("c"), tiers.client("short")
    told(c, 60, X_KV_TTL="500ms", X_Session_Id="brief")
    told(c, 61)
    # Looked at from outside: asking for the story again would renew its life.
    wait(lambda: not any(held_by(c, "brief").values()))
    assert told(c, 60) == 0
    told(short, 62, X_KV_TTL="1h")
    wait(lambda: tiers.held("short") == {"hbm": 0, "cpu": 0})
    for header in ({"X_KV_TTL": "soon"}, {"X_KV_TTL": "30"}, {"X_Session_Id": "a/b"}):
        assert c.post("/generate", {"text": "x"}, **header).status_code == 400
    assert told(c, 61) >= LEAST


@pytest.mark.trial(20)
@pytest.mark.trial(38)
def test_a_fixed_lifetime_ends_under_constant_use(tiers: Tiers) -> None:
    fixed = tiers.client("fixed")
    began = time.monotonic()
    told(fixed, 63)
    assert told(fixed, 63) >= LEAST
    wait(lambda: told(fixed, 63) == 0)
    assert time.monotonic() - began >= 3.9


def test_a_flushed_prefix_is_gone_with_what_continues_it(tiers: Tiers) -> None:
    c, admin = tiers.client("c"), tiers.client("admin")
    told(c, 70)
    told(c, 71)
    body = {"tenant": "c", "prefix": story(70)[:300]}
    answer = admin.post("/ext/v1/flush", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["ranks"][0]["freed"]["hbm_tokens"] >= LEAST
    assert told(c, 70) == 0
    assert told(c, 71) >= LEAST
    assert admin.post("/ext/v1/flush", {"tenant": "c", "prefix": "a"}).status_code == 400


@pytest.mark.trial(37)
@pytest.mark.trial(38)
def test_a_pinned_prefix_outlives_a_flood_and_can_be_let_go(tiers: Tiers) -> None:
    c = tiers.client("c")
    told(c, 80)
    (pinned,) = c.post("/ext/v1/pins", {"prefix": story(80), "ttl": "1h"}).json()["replicas"]
    assert pinned["pinned_tokens"] == pinned["cached_tokens"] >= LEAST
    flood(c, 400, 5)
    assert ask(c, 80).sources["device"] >= LEAST
    assert c.get("/ext/v1/pins").json()["replicas"][0]["all_pinned_tokens"] >= LEAST
    removed = httpx.delete(
        f"{tiers.server.url}/ext/v1/pins", headers={"authorization": "Bearer key-c"}, timeout=60
    )
    assert removed.json() == {"tenant": "c", "removed": 1}
    flood(c, 500, 5)
    assert ask(c, 80).sources["device"] < LEAST

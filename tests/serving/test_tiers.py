"""A small server with HBM, CPU and NVMe: equal answers from every tier, and after a restart."""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from sglang_ext.tenancy.keys import digest
from tests.serving.server import Client, ServerProcess

pytestmark = pytest.mark.serving

FLAGS = ("--max-total-tokens", "2000", "--mem-fraction-static", "0.3", "--sleep-on-idle")
NVME_BYTES = 400_000_000
WORDS = ("apple", "river", "stone", "cloud", "tiger", "lamp", "ocean", "forest", "paper", "music")
DEADLINE_S = 60
LEAST = 400
"""Tokens of a story that surely fill whole pages."""


class Tiers:
    """A server that a test may restart on the folder that it had."""

    def __init__(self, folder: Path) -> None:
        self.pages = folder / "pages"
        self.policy = folder / "tenants.yaml"
        keys = {name: digest(f"key-{name}") for name in ("a", "b", "c", "short", "fixed", "admin")}
        self.policy.write_text(
            "version: 1\n"
            f'admin_keys: ["{keys["admin"]}"]\n'
            f"tiers: {{cpu: {{size: 120MB}}, nvme: {{size: {NVME_BYTES}B, path: {self.pages}}}}}\n"
            "defaults: {quota: {hbm: 100%, cpu: 100%}}\n"
            "tenants:\n"
            f'  a: {{api_keys: ["{keys["a"]}"]}}\n'
            f'  b: {{api_keys: ["{keys["b"]}"]}}\n'
            f'  c: {{api_keys: ["{keys["c"]}"]}}\n'
            f'  fixed: {{api_keys: ["{keys["fixed"]}"], ttl: {{hbm: 1s, cpu: 2s, nvme: 4s, '
            "since: created}}\n"
            f'  short: {{api_keys: ["{keys["short"]}"], ttl: {{hbm: 1s, cpu: 2s, nvme: 3s, '
            "mode: strict}}\n",
            encoding="utf-8",
        )
        self.start()

    def start(self) -> None:
        arguments = ["--tenant-policy", str(self.policy), *FLAGS]
        self.server = ServerProcess("sglang_ext.launch_server", arguments)
        self.server.wait_ready()

    def restart(self) -> None:
        self.server.stop()
        self.start()

    def client(self, tenant: str) -> Client:
        return Client(self.server.url, f"key-{tenant}")

    def held(self, tenant: str) -> dict[str, int]:
        """Return the tokens of a tenant by tier, as the tree has them."""
        answer = self.client("admin").get(
            "/ext/v1/tree",
        )
        runs = [run for run in answer.json()["ranks"][0]["runs"] if run["owner"] == f"t:{tenant}"]
        return {
            tier: sum(run["tokens"] for run in runs if tier in run["tiers"])
            for tier in ("hbm", "cpu")
        }


def wait(until: Callable[[], bool]) -> None:
    """Return once ``until`` holds; fail after a minute."""
    end = time.monotonic() + DEADLINE_S
    while not until():
        assert time.monotonic() < end, "it never happened"


def story(number: int, words: int = 450) -> str:
    """Return a text of about 480 tokens with a fact that only it has."""
    drawn = random.Random(number)
    text = " ".join(drawn.choice(WORDS) for _ in range(words))
    return f"Story {number}. The secret number is {drawn.randrange(10**6)}. {text}"


@dataclass(frozen=True)
class Told:
    """A greedy answer, the log probability of its first token, where cached tokens came from."""

    text: object
    logprob: float
    sources: dict[str, int]

    @property
    def cached(self) -> int:
        return sum(self.sources.values())


def ask(client: Client, number: int) -> Told:
    answer = client.generate(story(number), tokens=12, return_logprob=True)
    meta: Any = answer["meta_info"]
    where = meta["cached_tokens_details"] or {}
    sources = {tier: where.get(tier, 0) for tier in ("device", "host", "storage")}
    return Told(answer["text"], meta["output_token_logprobs"][0][0], sources)


def flush(admin: Client, tenant: str) -> dict[str, dict[str, int]]:
    """Flush a tenant and return what that did."""
    answer = admin.post("/ext/v1/flush", {"tenant": tenant})
    assert answer.status_code == 200, answer.text
    (rank,) = answer.json()["ranks"]
    assert isinstance(rank, dict)
    return rank


def flood(client: Client, first: int, count: int) -> None:
    for number in range(first, first + count):
        client.generate(story(number))


@pytest.fixture(scope="module")
def tiers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiers]:
    tiers = Tiers(tmp_path_factory.mktemp("tiers"))
    try:
        yield tiers
        tiers.server.stop()
        assert not tiers.server.leaks(), tiers.server.leaks()
    finally:
        tiers.server.kill()


@pytest.mark.trial(43)
@pytest.mark.trial(63)
@pytest.mark.trial(74)
def test_answers_from_every_tier_and_after_a_restart_are_equal(tiers: Tiers) -> None:
    """Nobody's text stands in another's answer, whatever tier its pages come from."""
    a = tiers.client("a")
    numbers = range(3)
    cold = [ask(a, number) for number in numbers]
    assert all(told.cached == 0 for told in cold)
    hbm = [ask(a, number) for number in numbers]
    assert all(told.sources["device"] >= LEAST for told in hbm)
    flood(a, 100, 4)
    cpu = [ask(a, number) for number in numbers]
    assert all(told.sources["host"] >= LEAST for told in cpu), cpu
    flood(a, 200, 13)
    nvme = [ask(a, number) for number in numbers]
    assert all(told.sources["storage"] >= LEAST for told in nvme), nvme
    tiers.restart()
    again = [ask(tiers.client("a"), number) for number in numbers]
    assert all(told.sources["storage"] >= LEAST for told in again), again
    for answers in (cpu, nvme, again):
        assert [told.text for told in answers] == [told.text for told in hbm]
    # A prompt computed in one piece rounds otherwise than one that continues a cached page.
    gaps = [abs(new.logprob - old.logprob) for new, old in zip(cold, hbm, strict=True)]
    assert max(gaps) <= 0.05, gaps


@pytest.mark.trial(5)
def test_another_tenant_finds_nothing_of_it_in_any_tier(tiers: Tiers) -> None:
    a, b = tiers.client("a"), tiers.client("b")
    ask(a, 20)
    flood(a, 300, 13)
    assert ask(b, 20).cached == 0
    assert ask(a, 20).sources["storage"] >= LEAST


@pytest.mark.trial(20)
def test_pages_leave_each_tier_at_their_time(tiers: Tiers) -> None:
    """The clock of a strict tenant runs while the server is idle, and others stay."""
    short, b = tiers.client("short"), tiers.client("b")
    ask(b, 31)
    ask(short, 30)
    wait(lambda: tiers.held("short") == {"hbm": 0, "cpu": 0})
    assert tiers.held("b")["hbm"] >= LEAST
    for tier in ("hbm", "cpu"):
        left = f'sglang_ext_evicted_tokens_total{{owner="t:short",reason="ttl",tier="{tier}"}}'
        wait(lambda left=left: left in tiers.client("admin").get("/metrics").text)
    gone = 'sglang_ext_held_tokens{owner="t:short",tier="nvme"} 0.0'
    wait(lambda: gone in tiers.client("admin").get("/metrics").text)
    assert ask(short, 30).cached == 0


def test_a_flushed_tenant_is_gone_from_every_tier(tiers: Tiers) -> None:
    a, b, admin = tiers.client("a"), tiers.client("b"), tiers.client("admin")
    ask(b, 41)
    ask(a, 40)
    first = flush(admin, "a")
    assert first["freed"]["hbm_tokens"] >= LEAST
    assert first["freed"]["nvme_bytes"] > 0
    # A copy on its way down holds its page for a moment.
    wait(lambda: not any(flush(admin, "a")["in_use"].values()))
    assert tiers.held("a") == {"hbm": 0, "cpu": 0}
    assert ask(a, 40).cached == 0
    assert ask(b, 41).cached >= LEAST


def test_only_the_operator_flushes_and_only_whom_the_policy_knows(tiers: Tiers) -> None:
    assert tiers.client("a").post("/ext/v1/flush", {"tenant": "b"}).status_code in (401, 403, 404)
    for body in ({"tenant": "nobody"}, {}, {"tenant": "a", "all": True}):
        answer = tiers.client("admin").post("/ext/v1/flush", body)
        assert answer.status_code == 400
        assert "expected" in answer.text


@pytest.mark.trial(57)
def test_the_folder_stays_below_its_cap(tiers: Tiers) -> None:
    """In the numbers of the disk itself."""
    used = sum(path.stat().st_blocks * 512 for path in tiers.pages.rglob("*.slab"))
    assert 0 < used <= NVME_BYTES


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
    assert set(listed(c)) == {"other"}
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
    told(c, 60, X_KV_TTL="500ms")
    told(c, 61)
    wait(lambda: told(c, 60) == 0)
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


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def use_tool(client: Client) -> tuple[object, dict[str, int]]:
    """Ask what calls for a tool; return the whole message and where its prompt came from."""
    messages = [{"role": "user", "content": f"{story(70)} What is the weather in Paris?"}]
    answer = client.post(
        "/v1/chat/completions",
        {
            **{"model": "m", "messages": messages, "tools": [TOOL], "max_tokens": 24},
            **{"temperature": 0, "return_cached_tokens_details": True},
        },
    )
    answer.raise_for_status()
    choice = answer.json()["choices"][0]
    where = (answer.json().get("sglext") or choice.get("sglext") or {}).get("cached_tokens_details")
    return choice["message"], where or {}


@pytest.mark.trial(41)
def test_a_tool_call_is_the_same_from_every_tier(tiers: Tiers) -> None:
    c = tiers.client("c")
    cold, _ = use_tool(c)
    hbm, where = use_tool(c)
    assert where.get("device", 0) >= LEAST, where
    flood(tiers.client("a"), 800, 4)
    cpu, where = use_tool(c)
    assert where.get("host", 0) >= LEAST, where
    flood(tiers.client("a"), 810, 13)
    nvme, where = use_tool(c)
    assert where.get("storage", 0) >= LEAST, where
    assert hbm == cpu == nvme == cold


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

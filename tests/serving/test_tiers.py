"""A small server with HBM, CPU and NVMe: equal answers from every tier, and after a restart."""

import pytest

from tests.serving.server import Client
from tests.serving.tiered import (
    LEAST,
    NVME_BYTES,
    ROUNDING,
    Tiers,
    Told,
    apart,
    ask,
    equal,
    flood,
    flush,
    story,
    wait,
)

__all__ = ["LEAST", "Told", "ask", "flood", "wait"]

pytestmark = pytest.mark.serving


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
    assert equal(cpu, hbm)
    assert equal(nvme, hbm)
    for answers in (cold, cpu, nvme, again):
        assert apart(answers, hbm) <= ROUNDING, (answers, hbm)


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
        X_Session_Id="tool",
    )
    answer.raise_for_status()
    choice = answer.json()["choices"][0]
    where = (answer.json().get("sglext") or choice.get("sglext") or {}).get("cached_tokens_details")
    return choice["message"], where or {}


def put_away(client: Client, tier: str) -> bool:
    """Move the conversation with the tool down; tell whether all of it could be moved."""
    answer = client.post("/ext/v1/sessions/tool/pause", {"to": tier})
    assert answer.status_code == 200, answer.text
    return not any(answer.json()["in_use"].values())


@pytest.mark.trial(41)
def test_a_tool_call_is_the_same_from_every_tier(tiers: Tiers) -> None:
    c = tiers.client("c")
    cold, _ = use_tool(c)
    hbm, where = use_tool(c)
    assert where.get("device", 0) >= LEAST, where
    wait(lambda: put_away(c, "cpu"))
    cpu, where = use_tool(c)
    assert where.get("host", 0) >= LEAST, where
    wait(lambda: put_away(c, "nvme"))
    nvme, where = use_tool(c)
    assert where.get("storage", 0) >= LEAST, where
    assert hbm == cpu == nvme == cold


@pytest.mark.trial(5)
def test_another_tenant_finds_nothing_of_it_in_any_tier(tiers: Tiers) -> None:
    a, b = tiers.client("a"), tiers.client("b")
    ask(a, 20)
    flood(a, 300, 13)
    assert ask(b, 20).cached == 0
    assert ask(a, 20).sources["storage"] >= LEAST


@pytest.mark.trial(5)
def test_another_tenant_finds_nothing_of_a_sealed_one(tiers: Tiers) -> None:
    """In HBM and below it; whether the disk is worth a fetch depends on what was measured."""
    sealed, others = tiers.client("sealed"), [tiers.client(name) for name in ("sealed2", "b")]
    # Whoever holds most gives first: that must be who floods.
    tiers.client("admin").post("/ext/v1/flush", {"all": True}).raise_for_status()
    ask(sealed, 21)
    assert [ask(other, 21).cached for other in others] == [0, 0]
    flood(sealed, 300, 4)
    assert ask(sealed, 21).sources["host"] >= LEAST


@pytest.mark.trial(20)
@pytest.mark.parametrize(("tenant", "owner"), [("short", "t:short"), ("sealed2", "s:sealed2")])
def test_pages_leave_each_tier_at_their_time(tiers: Tiers, tenant: str, owner: str) -> None:
    """The clock of a strict tenant runs while the server is idle, and others stay."""
    short, b = tiers.client(tenant), tiers.client("b")
    ask(b, 31)
    ask(short, 30)
    wait(lambda: tiers.held(tenant) == {"hbm": 0, "cpu": 0})
    assert tiers.held("b")["hbm"] >= LEAST
    for tier in ("hbm", "cpu"):
        left = f'sglang_ext_evicted_tokens_total{{owner="{owner}",reason="ttl",tier="{tier}"}}'
        wait(lambda left=left: left in tiers.client("admin").get("/metrics").text)
    gone = f'sglang_ext_held_tokens{{owner="{owner}",tier="nvme"}} 0.0'
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

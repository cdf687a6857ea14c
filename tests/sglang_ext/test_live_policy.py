"""Another policy while the server runs: all of it or nothing, everywhere, and kept for later."""

import asyncio
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext import active
from sglang_ext.audit_log import AuditLog
from sglang_ext.leavers import Leaving, Requests
from sglang_ext.radix.integrity import check_integrity
from sglang_ext.tenancy.document import version_of
from sglang_ext.tenancy.identity import SYSTEM, Identity, current_identity
from sglang_ext.tenancy.keys import digest
from sglang_ext.tenancy.loader import load_policy
from sglang_ext.types import Owner, TenantId, Tier
from tests.radix.caches import namespace
from tests.sglang_ext.live import TEXT, Server, forget_policy

# What SGLang's handler of errors says of itself.
pytestmark = pytest.mark.filterwarnings("ignore:ORJSONResponse is deprecated")

NEW_KEY = digest("key-new")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    forget_policy(monkeypatch)
    return Server(tmp_path, ranks=2)


def lines(server: Server) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.audit.read_text().splitlines()]


def state(server: Server) -> list[Any]:
    """Everything that a change of policy may change."""
    return [
        active.policy(),
        server.path.read_text(),
        *((rank.scheduling.policy, rank.rig.cache._quotas) for rank in server.ranks),
        server.call("GET", "/ext/v1/usage", "key-new").status_code,
    ]


def limits(server: Server, owner: str) -> list[Any]:
    return [rank.rig.cache.limits(Owner(owner)) for rank in server.ranks]


def put(server: Server, text: str, **request: Any) -> Any:
    headers = {"content-type": "application/yaml"}
    return server.call("PUT", "/ext/v1/policy", content=text, headers=headers, **request)


def test_everything_changes_at_one_moment(server: Server) -> None:
    seen: list[list[Any]] = []
    server.before = lambda name: seen.append([active.policy(), *limits(server, "t:new")])
    text = TEXT + f"  new: {{api_keys: ['{NEW_KEY}'], quota: {{hbm: 100tok, hard: true}}}}\n"
    old = active.policy()
    answer = put(server, text)
    assert answer.status_code == 200, answer.text
    assert all(before[0] is old for before in seen), "something changed before all had agreed"
    assert [limit.quota for limit in limits(server, "t:new")] == [100, 100]
    assert all(rank.scheduling.hard == {"t:new"} for rank in server.ranks)
    assert all(rank.scheduling.limited for rank in server.ranks)
    assert server.call("GET", "/ext/v1/usage", "key-new").status_code == 200
    assert answer.json()["version"] == version_of(active.policy().document)


@pytest.mark.trial(26)
def test_trial_26_a_changed_policy_survives_a_restart(server: Server) -> None:
    body = {"api_keys": [NEW_KEY], "weight": 3}
    answer = server.call("PUT", "/ext/v1/tenants/new", json=body).json()
    assert answer["saved"]
    assert load_policy(server.path) == active.policy()
    assert load_policy(server.path).tenants[TenantId("new")].weight == 3
    assert server.path.with_name("tenants.yaml.bak").read_text() == TEXT


@pytest.mark.trial(26)
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tenants: {a: {qouta: 1}}", "tenants.a.qouta: unknown field"),
        ("tenants: {a: {}", "not valid YAML"),
        ("engine: {page_size: 32}", "engine.page_size: found 32, in force is 16"),
        ("tenants: {a: {reserve: {hbm: 60%}}, b: {reserve: {hbm: 60%}}}", "120%"),
        ("tenants: {a: {reserve: {hbm: 2ktok}}}", "reserve.hbm: 2ktok is 2000 tokens"),
        ("tenants: {a: {quota: {hbm: 1GB}}}", "how many bytes a token takes"),
    ],
)
def test_trial_26_a_wrong_policy_changes_nothing_and_says_why(
    server: Server, text: str, problem: str
) -> None:
    before = state(server)
    answer = put(server, f"version: 1\nadmin_keys: ['{digest('key-admin')}']\n{text}")
    assert answer.status_code == 400
    assert problem in answer.json()["message"]
    assert state(server) == before
    (line,) = lines(server)
    assert (line["action"], line["outcome"]) == ("policy", "refused")
    assert problem in line["reason"]


def test_one_rank_that_cannot_is_enough(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = server.ranks[1].rig.cache.token_to_kv_pool_allocator
    monkeypatch.setattr(allocator, "size", 10)
    before = state(server)
    answer = put(server, TEXT + "  d: {reserve: {hbm: 20tok}}\n")
    assert answer.status_code == 400
    assert "the 10 tokens of the hbm tier" in answer.text
    assert state(server) == before


def test_only_what_was_checked_last_is_put_in_force(server: Server) -> None:
    async def scenario() -> None:
        for checked in (False, True):
            for body in ({}, {"version": "x"}):
                if checked:
                    await server.ask("policy_check", {"document": active.policy().document})
                with pytest.raises(ValueError, match="not the policy checked last"):
                    await server.ask("policy_apply", body)

    asyncio.run(scenario())


def test_what_a_tenant_has_stays_when_another_changes(server: Server) -> None:
    tokens = list(range(100))
    for rank in server.ranks:
        rank.rig.insert(tokens, "t:a")
    put(server, TEXT + "  new: {quota: {hbm: 5%}}\ndefaults: {ttl: {mode: strict}}\n")
    assert [rank.rig.hit(tokens, "t:a") for rank in server.ranks] == [100, 100]
    assert all(rank.rig.cache.residency is not None for rank in server.ranks)


def test_a_lower_hard_quota_is_enforced_at_the_next_step(server: Server) -> None:
    for rank in server.ranks:
        rank.rig.insert(list(range(100)), "t:a")
    assert server.call("PUT", "/ext/v1/tenants/a", json={"quota": {"hbm": "40tok", "hard": True}})
    for rank in server.ranks:
        rank.rig.cache.tick()
        assert rank.rig.cache.ledger.usage(Owner("t:a"), Tier.HBM).tokens == 40
        check_integrity(rank.rig.cache)


# ---- the file


def test_somebodys_edit_is_never_overwritten(server: Server) -> None:
    edited = TEXT + "# my edit\n"
    server.path.write_text(edited)
    answer = server.call("PUT", "/ext/v1/tenants/new", json={}).json()
    assert not answer["saved"]
    assert "SIGHUP" in answer["not_saved_because"]
    assert server.path.read_text() == edited
    assert TenantId("new") in active.policy().tenants


def test_yaml_is_kept_as_it_was_given(server: Server) -> None:
    text = TEXT + "  new: {weight: 2}   # a comment\n"
    assert put(server, text).json()["saved"]
    assert server.path.read_text() == text


def test_sighup_reads_the_file_again(server: Server) -> None:
    server.path.write_text(TEXT + "  new: {weight: 2}\n")

    async def scenario() -> None:
        server.live.hang_up()
        while TenantId("new") not in active.policy().tenants:
            await asyncio.sleep(0)
        while server.live._tasks:
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(scenario(), 10))
    assert lines(server)[0]["by"] == "SIGHUP"
    assert server.call("PUT", "/ext/v1/tenants/two", json={}).json()["saved"]


def test_sighup_in_the_middle_of_a_tenants_request_is_the_operators(server: Server) -> None:
    server.path.write_text(TEXT.replace("  a:", "  late:"))
    server.requests["a"] = ["a/1"]
    callers: list[Identity] = []

    def abort(tenant: TenantId) -> int:
        callers.append(current_identity.get())
        return len(server.requests.pop(tenant, []))

    server.leavers._abort_requests = abort

    async def request() -> None:
        current_identity.set(Identity(TenantId("a"), Owner("t:a")))
        server.live.hang_up()

    async def scenario() -> None:
        await asyncio.create_task(request())
        while not server.live._tasks:
            await asyncio.sleep(0)
        server.requests["a"] = []
        await asyncio.gather(*server.live._tasks)

    asyncio.run(asyncio.wait_for(scenario(), 10))
    assert callers == [SYSTEM]


def test_sighup_with_a_wrong_file_changes_nothing(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.path.write_text("version: 2")
    before = state(server)
    asyncio.run(server.live.reload())
    assert state(server) == before
    assert "version: found 2, expected 1" in caplog.text
    assert server.call("PUT", "/ext/v1/tenants/new", json={}).json()["saved"] is False


def test_sighup_before_the_server_is_ready(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.live.hang_up()
    assert "send it again" in caplog.text


# ---- who goes


def cached(server: Server, owner: str) -> None:
    for rank in server.ranks:
        rank.rig.insert(list(range(50)), owner)


def held(server: Server, owner: str) -> int:
    ledgers = [rank.rig.cache.ledger for rank in server.ranks]
    return sum(ledger.usage(Owner(owner), tier).tokens for ledger in ledgers for tier in Tier)


def test_a_removed_tenant_leaves_nothing_and_others_lose_nothing(server: Server) -> None:
    for owner in ("t:a", "g:team"):
        cached(server, owner)
    for rank in server.ranks:
        rank.sessions = {"a/one": None, "b/two": None}
    answer = server.call("DELETE", "/ext/v1/tenants/a").json()
    pages = answer["removed"]["owners"]["t:a"]
    assert pages["freed"]["hbm_tokens"] == 100
    assert set(pages["left"].values()) == {0}
    assert (held(server, "t:a"), held(server, "g:team")) == (0, 100)
    assert all(rank.closed == ["a/one"] for rank in server.ranks)
    assert server.call("GET", "/ext/v1/usage", "key-a").status_code == 401
    assert [line["action"] for line in lines(server)] == ["policy", "removal"]


def test_pages_of_a_group_stay_until_its_last_member_leaves(server: Server) -> None:
    cached(server, "g:team")
    first = server.call("DELETE", "/ext/v1/tenants/b").json()["removed"]
    assert first == {"aborted_requests": {"b": 0}, "owners": {}}
    assert held(server, "g:team") == 100
    second = server.call("DELETE", "/ext/v1/tenants/c").json()["removed"]
    assert second["owners"]["g:team"]["freed"]["hbm_tokens"] == 100


def test_who_joins_a_group_leaves_its_own_pages(server: Server) -> None:
    cached(server, "t:a")
    body = {"isolation": "shared", "group": "team"}
    removed = server.call("PUT", "/ext/v1/tenants/a", json=body).json()["removed"]
    assert removed["aborted_requests"] == {}
    assert removed["owners"]["t:a"]["freed"]["hbm_tokens"] == 100


def test_requests_are_aborted_at_once_where_that_is_asked(server: Server) -> None:
    server.requests["a"] = ["a/1", "a/2"]
    answer = server.call("DELETE", "/ext/v1/tenants/a?requests=abort").json()
    assert answer["removed"]["aborted_requests"] == {"a": 2}


def test_requests_may_finish_first(server: Server) -> None:
    server.requests["a"] = ["a/1"]

    async def scenario() -> Any:
        deletion = asyncio.create_task(server.send("DELETE", "/ext/v1/tenants/a"))
        while TenantId("a") in active.policy().tenants:
            await asyncio.sleep(0)
        refused = await server.send("GET", "/ext/v1/usage", "key-a")
        assert refused.status_code == 401, "the key was still good"
        assert not deletion.done()
        server.requests["a"] = []
        return (await deletion).json()

    answer = asyncio.run(asyncio.wait_for(scenario(), 20))
    assert answer["removed"]["aborted_requests"] == {"a": 0}


def test_they_may_not_take_for_ever(server: Server) -> None:
    server.requests["a"] = ["a/1"]
    answer = server.call("DELETE", "/ext/v1/tenants/a?timeout=0").json()
    assert answer["removed"]["aborted_requests"] == {"a": 1}


def test_what_is_in_use_is_counted_until_it_is_free(server: Server) -> None:
    rig = server.ranks[0].rig
    cached(server, "t:a")
    lock = rig.cache.lock(rig.match(list(range(50)), "t:a").last_device_node)
    asked: list[str] = []

    def unlock_late(name: str) -> None:
        asked.append(name)
        if asked.count("remove_owner") == 3:
            rig.cache.unlock(lock)

    server.before = unlock_late
    pages = server.call("DELETE", "/ext/v1/tenants/a").json()["removed"]["owners"]["t:a"]
    assert pages == {
        "freed": {"hbm_tokens": 100, "cpu_tokens": 0, "nvme_bytes": 0},
        "left": {"hbm_tokens": 0, "cpu_tokens": 0, "nvme_bytes": 0},
    }


def test_a_group_member_in_use_does_not_hold_up_a_mere_change(server: Server) -> None:
    """Its requests go on, and what they hold goes first later."""
    rig = server.ranks[0].rig
    cached(server, "t:a")
    lock = rig.cache.lock(rig.match(list(range(50)), "t:a").last_device_node)
    body = {"isolation": "shared", "group": "team"}
    pages = server.call("PUT", "/ext/v1/tenants/a", json=body).json()["removed"]["owners"]["t:a"]
    assert pages["left"]["hbm_tokens"] == 50
    rig.cache.unlock(lock)
    assert rig.cache.limits(Owner("t:a")).quota == 0


# ---- many changes


def test_random_changes_keep_the_ledger_exact(server: Server) -> None:
    random_numbers = random.Random(5)
    names = ["a", "x", "y", "z"]
    for number in range(60):
        name = random_numbers.choice(names)
        for rank in server.ranks:
            start, size = random_numbers.randrange(5) * 1000, random_numbers.randrange(200)
            if TenantId(name) in active.policy().tenants:
                rank.rig.insert(list(range(start, start + size)), f"t:{name}")
        if random_numbers.random() < 0.3:
            server.call("DELETE", f"/ext/v1/tenants/{name}")
            assert held(server, f"t:{name}") == 0
        else:
            quota = {"hbm": f"{random_numbers.randrange(50, 500)}tok", "hard": number % 2 == 0}
            body = {"quota": quota, "weight": random_numbers.choice([0.5, 1, 2])}
            assert server.call("PUT", f"/ext/v1/tenants/{name}", json=body).status_code == 200
        for rank in server.ranks:
            rank.rig.cache.tick()
            check_integrity(rank.rig.cache)
            assert rank.rig.accounted() == rank.rig.size
    assert load_policy(server.path) == active.policy()


def test_changes_at_the_same_time_come_one_after_another(server: Server) -> None:
    async def scenario() -> list[int]:
        sent = [
            server.send("PUT", f"/ext/v1/tenants/n{number}", json={"weight": 2})
            for number in range(20)
        ]
        return [answer.status_code for answer in await asyncio.gather(*sent)]

    assert asyncio.run(scenario()) == [200] * 20
    assert len(active.policy().tenants) == 4 + 20
    assert load_policy(server.path) == active.policy()


# ---- the audit log


def test_the_audit_log_says_who_changed_what_and_no_key(server: Server) -> None:
    body = {"api_keys": [NEW_KEY], "weight": 2}
    server.call("PUT", "/ext/v1/tenants/new", json=body)
    server.call("PUT", "/ext/v1/tenants/new", json={"weight": 3})
    first, second = lines(server)
    assert first["by"] == digest("key-admin")[:15]
    assert {"path": "tenants.new.api_keys", "change": "added"} in first["changes"]
    assert second["changes"] == [
        {"path": "tenants.new.weight", "change": "changed", "old": 2, "new": 3}
    ]
    text = server.audit.read_text()
    for key in ("key-admin", "key-new"):
        assert digest(key) not in text
        assert key not in text


def test_a_full_disk_does_not_stop_a_change(server: Server) -> None:
    server.audit.mkdir()
    assert server.call("PUT", "/ext/v1/tenants/new", json={}).status_code == 200
    assert server.lost_lines == 1


def test_without_a_file_the_lines_go_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        AuditLog(None).write("me", "policy", "applied")
    assert '"by": "me"' in caplog.text


def test_the_log_may_be_rotated_at_any_time(server: Server) -> None:
    server.call("PUT", "/ext/v1/tenants/one", json={})
    server.audit.rename(server.audit.with_name("audit.1"))
    server.call("PUT", "/ext/v1/tenants/two", json={})
    assert len(lines(server)) == 1


# ---- what waits


def test_what_the_new_limits_can_never_admit_is_told_so(server: Server) -> None:
    rank = server.ranks[0]
    fits, outgrown = (_waiting(f"a/{size}", size) for size in (50, 500))
    rank.scheduler.waiting_queue = [outgrown, fits]
    body = {"quota": {"hbm": "100tok", "hard": True}}
    answer = server.call("PUT", "/ext/v1/tenants/a", json=body).json()
    assert answer["refused_requests"] == 1
    assert rank.scheduler.waiting_queue == [fits]
    assert rank.refused[0]["status_code"] == 400
    assert "100 (its hard quota)" in rank.refused[0]["message"]


def _waiting(rid: str, tokens: int) -> Any:
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=list(range(tokens)),
        sampling_params=SimpleNamespace(max_new_tokens=1),
        extra_key=namespace("t:a"),
        time_stats=SimpleNamespace(trace_ctx=SimpleNamespace(abort=lambda abort_info: None)),
    )


def test_defaults_of_leaving() -> None:
    assert Leaving() == Leaving(Requests.FINISH, 30.0)

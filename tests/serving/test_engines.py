"""Two engines behind one door: one tenant's engine may fall, and nobody else notices.

The trials of isolation run here again, with A in an engine of its own and B to E in the shared one.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from sglang_ext.tenancy.keys import digest
from tests.serving import test_timing
from tests.serving.conftest import GROUP, SMALL_POOL
from tests.serving.prompts import unique_prompt
from tests.serving.server import Client, ServerProcess
from tests.serving.steady import BACK_SECONDS, Steady, engines, scheduler_in, serves_again, until

# Imported tests run on the server of this module.
from tests.serving.test_identity import (  # noqa: F401
    test_a_bad_key_is_refused_in_the_routes_own_format,
    test_abort_reaches_only_the_callers_requests,
    test_anthropic_clients_send_x_api_key,
    test_sessions_are_the_tenants,
    test_the_client_sees_its_own_request_ids,
    test_two_tenants_may_use_one_request_id,
)
from tests.serving.test_isolation import (  # noqa: F401
    test_tenants_of_one_group_share,
    test_trial_2_salt_divides_a_tenants_own_space,
    test_trial_4_nothing_in_a_header_makes_b_into_a,
    test_trial_4_nothing_in_the_body_makes_b_into_a,
    test_trial_8_batch_of_completions,
    test_trial_8_five_tenants_first_sends_all_miss,
    test_trial_17_metrics_need_the_admin_key,
    test_trial_19_no_store_leaves_nothing,
)
from tests.serving.test_timing import (  # noqa: F401
    test_trial_1_bs_time_to_first_token_does_not_show_as_cache,
)

pytestmark = pytest.mark.serving

POLICY = """version: 1
admin_keys: ["%s"]
tenants:
  a:
    api_keys: ["%s"]
    isolation: dedicated
    gpus: [0]
    engine: {flags: ["--context-length", "4096"]}
"""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy with one dedicated tenant, four private ones and a group of two."""
    path = tmp_path_factory.mktemp("engines") / "tenants.yaml"
    lines = [f'  {name}: {{api_keys: ["{digest(f"key-{name}")}"]}}' for name in "bcde"]
    group = GROUP % (digest("key-sales"), digest("key-hr"))
    head = POLICY % (digest("key-admin"), digest("key-a"))
    path.write_text(head + "\n".join(lines) + group, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def server(policy: Path) -> Iterator[ServerProcess]:
    """A gateway with two engines; in the end no process and no leaked page is left."""
    audit = policy.with_name("audit.jsonl")
    flags = ["--tenant-policy", str(policy), "--audit-log", str(audit), *SMALL_POOL]
    server = ServerProcess("sglang_ext.launch_server", [*flags, "--page-size", "16"])
    try:
        server.wait_for("all 2 engines are ready: shared, a")
        yield server
        assert server.stop() == 0
        assert not server.leaks(), server.leaks()
    finally:
        server.kill()


@pytest.fixture
def level(monkeypatch: pytest.MonkeyPatch) -> str:
    """What the names of the tenants of a trial begin with; the sealed ones are elsewhere."""
    # A's hits are in another process: fewer pairs than within one server show as much.
    monkeypatch.setitem(test_timing._PAIRS, "", 16)
    return ""


def test_each_engine_has_processes_and_cores_of_its_own(admin: Client) -> None:
    rows = engines(admin)
    assert {name: row["dedicated_to"] for name, row in rows.items()} == {"shared": None, "a": "a"}
    trees = {
        name: [psutil.Process(row["pid"]), *psutil.Process(row["pid"]).children(recursive=True)]
        for name, row in rows.items()
    }
    assert all(len(tree) > 1 for tree in trees.values())
    cores = {name: {tuple(one.cpu_affinity()) for one in tree} for name, tree in trees.items()}
    if len(os.sched_getaffinity(0)) > 1:
        assert not set().union(*cores["shared"]) & set().union(*cores["a"])


def test_each_engine_knows_its_own_tenants_only(admin: Client) -> None:
    """What an engine was told is its part of the policy: see the files that it started with."""
    for name, row in engines(admin).items():
        command = psutil.Process(row["pid"]).cmdline()
        told = Path(command[command.index("--tenant-policy") + 1]).read_text(encoding="utf-8")
        mine = {"a"} if name == "a" else {"b", "c", "d", "e", "sales", "hr"}
        for tenant in ("a", "b", "c", "d", "e", "sales", "hr"):
            assert (digest(f"key-{tenant}") in told) == (tenant in mine)


def test_an_engine_answers_its_gateway_only(admin: Client) -> None:
    for row in engines(admin).values():
        command = psutil.Process(row["pid"]).cmdline()
        port = [command[place + 1] for place, word in enumerate(command) if word == "--port"][-1]
        for key in ("key-a", "key-b", "key-admin"):
            direct = Client(f"http://127.0.0.1:{port}", key)
            assert direct.get("/v1/models").status_code == 403
            assert direct.post("/generate", {"text": "hello"}).status_code == 403


def test_flags_of_the_tenants_own_engine_hold_for_it_alone(admin: Client) -> None:
    lengths = [
        admin.get("/server_info", x_engine=name).json()["context_length"]
        for name in ("a", "shared")
    ]
    assert lengths[0] == 4096
    assert lengths[1] != 4096


def test_metrics_are_one_page_with_the_engines_names(a: Client, b: Client, admin: Client) -> None:
    for client in (a, b):
        client.generate("hello")
    page = admin.get("/metrics").text
    lines = [line for line in page.splitlines() if line.startswith("sglang_ext_requests_total{")]
    whose = {(name, tenant) for line in lines for name, tenant in [_labels(line)]}
    assert ("a", "a") in whose
    assert ("shared", "b") in whose
    assert ("shared", "a") not in whose
    assert ("a", "b") not in whose
    assert 'sglang_ext_ready_engines{engine="a"} 1.0' in page
    assert page.count("# TYPE sglang_ext_requests_total ") == 1


def _labels(line: str) -> tuple[str, str]:
    labels = dict(part.split("=") for part in line.partition("{")[2].partition("}")[0].split(","))
    return labels["engine"].strip('"'), labels["tenant"].strip('"')


def test_usage_and_tree_are_the_operators_in_one_piece(a: Client, b: Client, admin: Client) -> None:
    assert set(a.get("/ext/v1/usage").json()["tenants"]) == {"a"}
    assert set(b.get("/ext/v1/usage").json()["tenants"]) == {"b"}
    assert {"a", "b", "sales"} <= set(admin.get("/ext/v1/usage").json()["tenants"])
    ranks = admin.get("/ext/v1/tree").json()["ranks"]
    owners = {rank["engine"]: {run["owner"] for run in rank["runs"]} for rank in ranks}
    assert owners["a"] <= {"s:a", "t:system"}
    assert "s:a" not in owners["shared"]


def test_a_flush_reaches_the_tenants_engine(a: Client, b: Client, admin: Client) -> None:
    text = unique_prompt("engines flush")
    for client in (a, b):
        client.generate(text)
        assert client.cached(text) > 0
    answer = admin.post("/ext/v1/flush", {"tenant": "a"})
    assert [rank["engine"] for rank in answer.json()["ranks"]] == ["a"]
    assert a.cached(text) == 0
    assert b.cached(text) > 0
    assert admin.post("/ext/v1/flush", {"all": True}).status_code == 200
    assert [client.cached(text) for client in (a, b)] == [0, 0]


def test_a_dedicated_tenant_neither_comes_nor_goes_while_it_runs(admin: Client) -> None:
    before = admin.get("/ext/v1/policy").json()
    own = {"isolation": "dedicated", "gpus": [1]}
    for method, tenant in (("PUT", "b"), ("PUT", "new")):
        answer = admin.put(f"/ext/v1/tenants/{tenant}", own)
        assert answer.status_code == 400, method
        assert "cannot change while the server runs" in answer.text
        assert f"tenants.{tenant}.gpus" in answer.text
    for answer in (admin.put("/ext/v1/tenants/a", {}), admin.delete("/ext/v1/tenants/a")):
        assert answer.status_code == 400
        assert "tenants.a.gpus" in answer.text
    assert admin.get("/ext/v1/policy").json() == before


def test_what_one_engine_refuses_changes_none(admin: Client, b: Client) -> None:
    """The whole file fits; the pool of the shared engine does not hold this floor."""
    before = admin.get("/ext/v1/policy").json()["version"]
    answer = admin.put("/ext/v1/tenants/e", {"reserve": {"hbm": "30000tok"}})
    assert answer.status_code == 400
    assert "20000" in answer.text
    assert admin.get("/ext/v1/policy").json()["version"] == before
    assert "30000" not in b.get("/ext/v1/usage").text


def test_tenants_come_change_and_go_in_their_engine(admin: Client, server: ServerProcess) -> None:
    added = admin.put("/ext/v1/tenants/new", {"api_keys": [digest("key-new")]})
    assert added.status_code == 200, added.text
    new, text = Client(server.url, "key-new"), unique_prompt("engines new")
    new.generate(text)
    assert new.cached(text) > 0
    gone = admin.delete("/ext/v1/tenants/new").json()
    pages = gone["removed"]["owners"]["t:new"]
    assert sum(pages["freed"].values()) > 0
    assert sum(pages["left"].values()) == 0
    assert new.get("/v1/models").status_code == 401


def test_a_killed_engine_is_back_and_nobody_else_noticed(
    server: ServerProcess, a: Client, admin: Client
) -> None:
    """Kill its scheduler: SGLang has to end the rest of it, and the gateway to start it again."""
    asyncio.run(_kill_under_load(server, a, admin))


async def _kill_under_load(server: ServerProcess, a: Client, admin: Client) -> None:
    load = Steady(server.url)
    row = engines(admin)["a"]
    first = psutil.Process(row["pid"])
    family = [first, *first.children(recursive=True)]
    async with httpx.AsyncClient(timeout=120) as client:
        others = [asyncio.create_task(load.run(client, tenant)) for tenant in "bcd"]
        own = Steady(server.url)
        mine = asyncio.create_task(own.run(client, "a"))
        await until(lambda: min((load.served + own.served)[tenant] for tenant in "abcd") >= 3)
        scheduler_in(family).send_signal(signal.SIGKILL)
        killed, sent = time.monotonic(), sum(load.served.values())
        await until(lambda: bool(own.failed))
        own.stopped = True
        await mine
        await asyncio.to_thread(serves_again, a)
        back = time.monotonic() - killed
        await until(lambda: sum(load.served.values()) > sent + 10)
        load.stopped = True
        await asyncio.gather(*others)
    print(f"back after {back:.1f} s; {dict(load.served)} of others served")
    assert not load.failed, load.failed
    assert back < BACK_SECONDS
    assert all(failure.startswith(("a: 50", "a: Remote", "a: Read")) for failure in own.failed)
    now = engines(admin)["a"]
    assert now["pid"] != row["pid"]
    assert now["restarts"] == row["restarts"] + 1
    assert engines(admin)["shared"]["restarts"] == 0
    assert not [one for one in family if one.is_running() and one.status() != "zombie"]


def test_the_audit_log_names_who_changed_what(policy: Path) -> None:
    lines = policy.with_name("audit.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert {row["by"] for row in rows if row["action"] == "policy"} == {digest("key-admin")[:15]}
    assert any(row["outcome"] == "applied" for row in rows)
    assert "key-" not in "".join(lines)

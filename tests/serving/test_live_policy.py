"""Trial 26 on the real server: the policy changes again and again while it serves."""

import asyncio
import json
import os
import signal
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from sglang_ext.tenancy.keys import digest
from tests.serving.conftest import run_server
from tests.serving.prompts import unique_prompt
from tests.serving.server import Client, ServerProcess, policy_file

pytestmark = pytest.mark.serving

RELOADS = int(os.environ.get("SGLANG_EXT_RELOADS", "100"))
"""How often the policy changes under load; 1,000 takes about ten times as long."""
STABLE = ("a", "b")
COMING_AND_GOING = ("x", "y")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("live")


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[ServerProcess]:
    """A server with an audit log, on which a change is seen at once."""
    policy = policy_file(folder, STABLE)
    audit = str(folder / "audit.jsonl")
    yield from run_server(policy, "--page-size", "16", "--audit-log", audit)


@pytest.fixture
def admin(live: ServerProcess) -> Client:
    return Client(live.url, "key-admin")


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]


def tokens_in_tree(admin: Client) -> Counter[str]:
    """Return the tokens of each owner in HBM, added up from a dump of the whole tree."""
    (rank,) = admin.get("/ext/v1/tree?limit=10000").json()["ranks"]
    assert rank["pages"] <= 1
    found: Counter[str] = Counter()
    for run in rank["runs"]:
        if "hbm" in run["tiers"]:
            found[run["owner"]] += run["tokens"]
    return found


class Load:
    """Sends requests without a pause until it is told to stop; each must be answered whole."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.stopped = False
        self.served: Counter[str] = Counter()
        self._sent = 0

    async def run(self, tenant: str) -> None:
        while not self.stopped:
            await self.one(tenant)

    async def one(self, tenant: str) -> None:
        self._sent += 1
        text = f"{unique_prompt(tenant, 40)} {unique_prompt(f'{tenant} {self._sent % 7}', 20)}"
        sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
        body = {"text": text, "stream": self._sent % 2 == 0, "sampling_params": sampling}
        headers = {"authorization": f"Bearer key-{tenant}"}
        answer = await self._client.post("/generate", json=body, headers=headers)
        assert answer.status_code == 200, f"{tenant}: {answer.status_code} {answer.text}"
        assert '"completion_tokens":4' in answer.text, answer.text
        self.served[tenant] += 1


async def change(client: httpx.AsyncClient, load: Load, number: int) -> float:
    """Make one change, and return how many seconds it took."""
    headers = {"authorization": "Bearer key-admin"}
    name = COMING_AND_GOING[number // 4 % 2]
    begun = time.perf_counter()
    if number % 4 == 0:
        quota = {"hbm": f"{30 + number % 30}%", "hard": number % 8 == 0}
        body = {"weight": 1 + number % 3, "quota": quota}
        answer = await client.put("/ext/v1/tenants/a", json=body, headers=headers)
    elif number % 2 == 1:
        body = {"api_keys": [digest(f"key-{name}")], "reserve": {"hbm": "5%"}}
        answer = await client.put(f"/ext/v1/tenants/{name}", json=body, headers=headers)
    else:
        answer = await client.delete(f"/ext/v1/tenants/{name}", headers=headers)
    took = time.perf_counter() - begun
    assert answer.status_code == 200, answer.text
    if number % 4 == 1:
        await load.one(name)
    return took


@pytest.mark.trial(26)
def test_trial_26_many_changes_under_load_lose_no_request_and_no_page(
    live: ServerProcess, admin: Client
) -> None:
    async def scenario() -> tuple[Load, list[float]]:
        async with httpx.AsyncClient(base_url=live.url, timeout=180) as client:
            load = Load(client)
            running = [asyncio.create_task(load.run(name)) for name in STABLE]
            took = [await change(client, load, number) for number in range(RELOADS)]
            load.stopped = True
            await asyncio.gather(*running)
            for name in COMING_AND_GOING:
                headers = {"authorization": "Bearer key-admin"}
                await client.delete(f"/ext/v1/tenants/{name}", headers=headers)
        return load, took

    load, took = asyncio.run(scenario())
    print(
        f"{RELOADS} changes, {load.served.total()} requests, all answered; a change took "
        f"{statistics.median(took):.3f} s in the median, {max(took):.3f} s at most"
    )
    assert min(load.served[name] for name in (*STABLE, *COMING_AND_GOING)) > 0
    held = tokens_in_tree(admin)
    assert set(held) <= {f"t:{name}" for name in (*STABLE, "system")}, "a page was left behind"
    usage = admin.get("/ext/v1/usage").json()["tenants"]
    assert set(usage) == {*STABLE, "system"}
    for name in STABLE:
        assert usage[name]["tiers"]["hbm"]["held_tokens"] == held[f"t:{name}"] > 0


@pytest.mark.trial(26)
def test_trial_26_sighup_reads_the_file_and_a_wrong_one_changes_nothing(
    live: ServerProcess, admin: Client, folder: Path
) -> None:
    path = folder / "tenants.yaml"
    good = path.read_text()
    path.write_text("version: 1\ntenants: {a: {qouta: 1}}\n")
    os.kill(live.pid, signal.SIGHUP)
    live.wait_for("tenants.a.qouta: unknown field")
    assert Client(live.url, "key-b").generate("still here")
    key = digest("key-late")
    path.write_text(good + f'  late: {{api_keys: ["{key}"]}}\n')
    os.kill(live.pid, signal.SIGHUP)
    live.wait_for("policy file read again")
    assert Client(live.url, "key-late").generate("just come")
    assert [line["outcome"] for line in lines(folder) if line["by"] == "SIGHUP"] == [
        "refused",
        "applied",
    ]
    assert key not in (folder / "audit.jsonl").read_text()


@pytest.mark.parametrize("how", ["finish", "abort"])
def test_a_removed_tenants_requests_end_as_it_was_asked(
    live: ServerProcess, admin: Client, how: str
) -> None:
    body = {"api_keys": [digest("key-gone")]}
    assert admin.put("/ext/v1/tenants/gone", body).status_code == 200
    gone = Client(live.url, "key-gone")
    sampling = {"max_new_tokens": 60 if how == "finish" else 2000, "ignore_eos": True}
    events = gone.events("/generate", {"text": "on", "stream": True, "sampling_params": sampling})
    next(events)
    with ThreadPoolExecutor() as pool:
        removal = pool.submit(admin.delete, f"/ext/v1/tenants/gone?requests={how}")
        last = json.loads(list(events)[-1])["meta_info"]
    removed = removal.result().json()["removed"]
    assert removed["aborted_requests"] == {"gone": int(how == "abort")}
    assert set(removed["owners"]["t:gone"]["left"].values()) == {0}
    assert last["finish_reason"]["type"] == ("length" if how == "finish" else "abort")
    assert gone.get("/ext/v1/usage").status_code == 401


def test_a_tenant_sees_itself_and_only_the_admin_sees_all(
    live: ServerProcess, admin: Client
) -> None:
    a = Client(live.url, "key-a")
    assert list(a.get("/ext/v1/usage").json()["tenants"]) == ["a"]
    assert a.get("/ext/v1/policy").status_code == 403
    assert a.put("/ext/v1/tenants/a", {}).status_code == 403
    shown = admin.get("/ext/v1/policy")
    assert digest("key-a") not in shown.text
    assert digest("key-a")[:15] in shown.text
    stale = admin.put("/ext/v1/tenants/a", {}, if_match='"0000000000000000"')
    assert stale.status_code == 412
    again = admin.put("/ext/v1/tenants/a", {}, if_match=shown.headers["etag"])
    assert again.status_code == 200


def test_what_cannot_change_is_refused_with_its_reason(admin: Client) -> None:
    document = admin.get("/ext/v1/policy").json()["policy"]
    keys = [digest("key-admin")]
    body = {**document, "engine": {"page_size": 32}, "tenants": {}, "admin_keys": keys}
    answer = admin.put("/ext/v1/policy", body)
    assert answer.status_code == 400
    assert "engine.page_size: found 32, in force is 16" in answer.json()["message"]

"""Servers that share a Mooncake store: one finds what another computed, whatever happens to it."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_ext.tenancy.keys import digest
from tests.mooncake import Cluster, end, start_cluster
from tests.serving.events import Index
from tests.serving.server import Client, ServerProcess, free_port
from tests.serving.tiered import FLAGS, LEAST, ask, story, wait

pytestmark = pytest.mark.serving

LENT_BYTES = 600 * 2**20
REMOTE_BYTES = 500_000_000
NVME_BYTES = 400_000_000
TENANTS = ("a", "b", "c", "sealed")


class Servers:
    """One store, and one server at a time, each with a disk of its own."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self.folder = folder
        self.cluster = cluster
        self.started = 0
        self.master_key = folder / "master.key"
        self.master_key.write_text("5e" * 32)
        self.master_key.chmod(0o600)
        self.server = self.start()

    def start(self) -> ServerProcess:
        """Start the next server, whose disk is empty."""
        self.started += 1
        policy = self.folder / f"tenants-{self.started}.yaml"
        keys = {name: digest(f"key-{name}") for name in (*TENANTS, "admin")}
        address = self.cluster.address
        policy.write_text(
            "version: 1\n"
            f'admin_keys: ["{keys["admin"]}"]\n'
            "tiers:\n"
            "  load: always\n"
            "  cpu: {size: 120MB}\n"
            f"  nvme: {{size: {NVME_BYTES}B, path: {self.folder / str(self.started)}, "
            f"master_key: {self.master_key}}}\n"
            f'  remote: {{backend: mooncake, master: "{address.master}", '
            f'admin: "{address.admin}", size: {REMOTE_BYTES}B}}\n'
            "defaults: {quota: {hbm: 100%, cpu: 100%, remote: 100%}}\n"
            "tenants:\n"
            f'  a: {{api_keys: ["{keys["a"]}"]}}\n'
            f'  b: {{api_keys: ["{keys["b"]}"]}}\n'
            f'  c: {{api_keys: ["{keys["c"]}"]}}\n'
            f'  sealed: {{api_keys: ["{keys["sealed"]}"], isolation: sealed}}\n',
            encoding="utf-8",
        )
        events = f"tcp://127.0.0.1:{free_port()}"
        publisher = json.dumps({"publisher": "zmq", "endpoint": events, "bind": True})
        arguments = ["--tenant-policy", str(policy), "--kv-events-config", publisher, *FLAGS]
        self.server = ServerProcess("sglang_ext.launch_server", arguments)
        self.server.wait_ready()
        self.index = Index(events)
        self.index.begin(lambda attempt: self.client("c").generate(story(attempt, 30)))
        return self.server

    def another(self) -> None:
        """Let a server with an empty disk take the place of this one."""
        self.index.close()
        self.server.stop()
        self.start()

    def client(self, tenant: str) -> Client:
        return Client(self.server.url, f"key-{tenant}")

    def events(self, event: str) -> float:
        """Return how often something happened to the remote store."""
        name = f'sglang_ext_store_events_total{{event="remote_{event}"}} '
        lines = self.client("admin").get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    def hbm_tokens(self, tenant: str) -> int:
        """Return what the tree has of a tenant in HBM."""
        (rank,) = self.client("admin").get("/ext/v1/tree").json()["ranks"]
        runs = [run for run in rank["runs"] if run["owner"] == f"t:{tenant}"]
        return sum(int(run["tokens"]) for run in runs if "hbm" in run["tiers"])

    def remote_tokens(self, tenant: str) -> int:
        """Return what a tenant holds in the remote store, in tokens."""
        answer = self.client("admin").get("/ext/v1/usage").json()
        return int(answer["tenants"][tenant]["tiers"]["remote"]["held_tokens"])


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("remote")
    cluster = start_cluster(folder, LENT_BYTES)
    servers = None
    try:
        servers = Servers(folder, cluster)
        yield servers
        servers.index.close()
        servers.server.stop()
        assert not servers.server.leaks(), servers.server.leaks()
    finally:
        if servers is not None:
            servers.server.kill()
        cluster.stop()


PAGES = LEAST // 16


@pytest.mark.trial(51)
@pytest.mark.trial(59)
@pytest.mark.trial(63)
def test_a_conversation_is_found_by_a_server_that_never_saw_it(servers: Servers) -> None:
    cold = {tenant: ask(servers.client(tenant), 1) for tenant in ("a", "sealed")}
    wait(lambda: servers.events("stored") >= 2 * PAGES)
    servers.another()
    assert ask(servers.client("b"), 1).cached == 0, "another tenant's pages"
    for tenant, before in cold.items():
        again = ask(servers.client(tenant), 1)
        assert again.sources["storage"] >= LEAST, again
        assert abs(again.logprob - before.logprob) <= 0.25
    wait(lambda: servers.events("hit") >= 2 * PAGES)


@pytest.mark.trial(9)
@pytest.mark.trial(10)
@pytest.mark.trial(14)
def test_a_router_knows_whose_the_pages_are_that_came_from_the_store(servers: Servers) -> None:
    """Here two tenants have one story, which this server has read for one and computed for one."""
    index, a = servers.index, servers.client("a")

    def is_what_the_tree_has() -> bool:
        return all(
            16 * len(index.blocks(f"t:{tenant}")) == servers.hbm_tokens(tenant) for tenant in "ab"
        )

    wait(is_what_the_tree_has)
    assert len(index.blocks("t:a")) >= PAGES
    assert len(index.blocks("t:b")) >= PAGES
    assert not index.blocks("t:a") & index.blocks("t:b")
    assert len(index.texts("t:a") & index.texts("t:b")) >= PAGES
    assert index.owners() <= {"t:a", "t:b", "t:c"}, "no word of sealed tenants"
    before = index.texts("t:a")
    ask(a, 3)
    wait(is_what_the_tree_has)
    new = index.texts("t:a") - before
    assert len(new) >= PAGES
    assert not new & index.texts("t:b"), "nothing there is warm for the other"


@pytest.mark.trial(65)
def test_a_killed_master_gives_misses_and_comes_back(servers: Servers) -> None:
    a = servers.client("a")
    answers: list[object] = []

    def load() -> None:
        answers.extend(a.generate(story(number), tokens=2)["text"] for number in range(100, 106))

    thread = threading.Thread(target=load)
    thread.start()
    wait(lambda: bool(answers))
    end(servers.cluster.master)
    thread.join()
    assert len(answers) == 6
    wait(lambda: servers.events("silent") > 0)
    stored = servers.events("stored")
    servers.cluster.start_master()
    number = 200

    def is_used_again() -> bool:
        nonlocal number
        number += 1
        a.generate(story(number))
        return servers.events("stored") > stored

    wait(is_used_again)


@pytest.mark.trial(9)
def test_a_flush_takes_the_pages_of_all_machines(servers: Servers) -> None:
    a, admin = servers.client("a"), servers.client("admin")
    before = servers.remote_tokens("a")
    ask(a, 2)
    wait(lambda: servers.remote_tokens("a") >= before + LEAST)
    (rank,) = admin.post("/ext/v1/flush", {"tenant": "a"}).json()["ranks"]
    assert rank["freed"]["remote_bytes"] > 0
    assert servers.remote_tokens("a") == 0
    wait(lambda: not servers.index.blocks("t:a"))
    assert ask(a, 2).cached == 0

"""Two servers that a gateway did not start, as on two machines, and the store that they share."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.gateway.plan import EngineSpec
from sglang_ext.gateway.routing import Routing
from sglang_ext.tenancy.keys import digest
from sglang_ext.types import TenantId
from tests.mooncake import Cluster, start_cluster
from tests.serving.replicas import told
from tests.serving.server import Client, ServerProcess
from tests.serving.tiered import FLAGS, LEAST, story, wait

pytestmark = pytest.mark.serving

NODES = ("n1", "n2")
LENT_BYTES = 600 * 2**20
_ROUTING = Routing(EngineSpec(name, None, 0, 1, url="x") for name in NODES)


def session_at(tenant: str, node: str, label: str) -> str:
    """Return the name of a conversation of ``tenant`` whose home is ``node``."""
    names = (f"{label}-{number}" for number in count())
    return next(name for name in names if _ROUTING.order(TenantId(tenant), name, {})[0] == node)


class Machines:
    """The nodes, each with a disk of its own, and the gateway, which runs no engine."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self.folder = folder
        self.cluster = cluster
        self.key = self._secret("master.key")
        self.secret = self._secret("gateway.secret")
        self.nodes: dict[str, ServerProcess] = {}

    def start(self) -> None:
        """Start the nodes at once, and then the gateway."""
        for name in NODES:
            self.nodes[name] = self._start(name)
        for node in self.nodes.values():
            node.wait_ready()
        file = self.folder / "nodes.yaml"
        urls = "".join(f"  {name}: {node.url}\n" for name, node in self.nodes.items())
        file.write_text(f"secret: {self.secret}\nnodes:\n{urls}")
        # Only the gateway's policy knows the tenants.
        policy = self.folder / "gateway.yaml"
        keys = "".join(f'  {name}: {{api_keys: ["{digest(f"key-{name}")}"]}}\n' for name in "ab")
        policy.write_text(f'version: 1\nadmin_keys: ["{digest("key-admin")}"]\ntenants:\n{keys}')
        words = ["--tenant-policy", str(policy), "--engines", "0", "--nodes", str(file)]
        self.gateway = ServerProcess("sglang_ext.launch_server", words)
        self.gateway.wait_for("all 2 engines are ready: n1, n2")

    def client(self, tenant: str) -> Client:
        return Client(self.gateway.url, f"key-{tenant}")

    def row(self, node: str) -> dict[str, Any]:
        rows = self.client("admin").get("/ext/v1/engines").json()["engines"]
        return next(row for row in rows if row["engine"] == node)

    def sessions(self, node: str, tenant: str) -> set[str]:
        answer = self.client("admin").get(f"/ext/v1/sessions?tenant={tenant}", x_engine=node)
        return {row["session"] for row in answer.json()["sessions"]}

    def order(self, node: str, what: str) -> dict[str, Any]:
        answer = self.client("admin").post(f"/ext/v1/engines/{node}/{what}", None)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def kill(self) -> None:
        for process in self.nodes.values():
            process.kill()
        if "gateway" in vars(self):
            self.gateway.kill()

    def _secret(self, name: str) -> Path:
        path = self.folder / name
        path.write_text("5e" * 32)
        path.chmod(0o600)
        return path

    def _start(self, name: str) -> ServerProcess:
        policy = self.folder / f"{name}.yaml"
        address = self.cluster.address
        policy.write_text(
            "version: 1\n"
            f'admin_keys: ["{digest("key-admin")}"]\n'
            "tiers:\n"
            "  load: always\n"
            "  cpu: {size: 120MB}\n"
            f"  nvme: {{size: 400MB, path: {self.folder / name}, master_key: {self.key}}}\n"
            f'  remote: {{backend: mooncake, master: "{address.master}", '
            f'admin: "{address.admin}", size: 500MB}}\n'
            "tenants: {}\n",
            encoding="utf-8",
        )
        words = ["--tenant-policy", str(policy), "--gateway-secret", str(self.secret), *FLAGS]
        return ServerProcess("sglang_ext.launch_server", words)


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    folder = tmp_path_factory.mktemp("nodes")
    cluster = start_cluster(folder, LENT_BYTES)
    machines = Machines(folder, cluster)
    try:
        machines.start()
        yield machines
        assert machines.gateway.stop() == 0
        for node in machines.nodes.values():
            assert not node.leaks(), node.leaks()
        machines.nodes["n2"].stop()
    finally:
        machines.kill()
        cluster.stop()


@pytest.mark.trial(14)
def test_a_node_answers_its_gateway_alone_and_with_its_policy(machines: Machines) -> None:
    assert machines.client("a").get("/v1/models").status_code == 200
    for node in machines.nodes.values():
        for key in ("a", "admin"):
            assert Client(node.url, f"key-{key}").get("/v1/models").status_code == 403
    added = machines.client("admin").put("/ext/v1/tenants/c", {"api_keys": [digest("key-c")]})
    assert added.status_code == 200, added.text
    for number, node in enumerate(NODES, 900):
        text = story(number)
        assert told(machines.client("a"), text, session_at("a", node, "mine")) == 0
        assert told(machines.client("c"), text, session_at("c", node, "mine")) == 0


@pytest.mark.trial(18)
def test_the_conversations_of_a_drained_node_are_found_by_the_other(machines: Machines) -> None:
    gone, left = NODES
    a, b, text = machines.client("a"), machines.client("b"), story(910)
    chat = session_at("a", gone, "move")
    assert told(a, text, chat) == 0
    assert chat in machines.sessions(gone, "a")
    machines.order(gone, "drain")
    wait(lambda: machines.row(gone)["drain"]["state"] == "drained")
    drain = machines.row(gone)["drain"]
    assert drain["sessions"] == drain["moved"] >= 1, drain
    assert told(a, text, chat) >= LEAST, "it came from the store"
    assert chat in machines.sessions(left, "a")
    assert told(b, text, session_at("b", gone, "move")) == 0
    machines.order(gone, "resume")
    assert told(a, text, chat) >= LEAST
    assert chat in machines.sessions(gone, "a")


def test_a_node_that_is_killed_leaves_its_conversations_to_the_other(machines: Machines) -> None:
    gone, left = NODES
    a, text = machines.client("a"), story(920)
    chat = session_at("a", gone, "kill")
    assert told(a, text, chat) == 0
    wait(lambda: _is_below(machines, gone, chat))
    machines.nodes[gone].kill()
    # Until then its socket may still take a request, which is never sent twice.
    machines.nodes[gone].wait_exit()
    assert told(a, text, chat) >= LEAST, "it came from the store"
    wait(lambda: machines.row(gone)["state"] == "away")
    assert chat in machines.sessions(left, "a")
    assert machines.client("admin").get("/ready").status_code == 503
    # Another policy reaches who is there; who is not, when it comes back.
    assert machines.client("admin").put("/ext/v1/tenants/d", {"weight": 2}).status_code == 200


def _is_below(machines: Machines, node: str, chat: str) -> bool:
    """Tell whether the node's disk, and with it the store, has a conversation."""
    listed = machines.client("admin").get("/ext/v1/sessions?tenant=a", x_engine=node).json()
    rows = {row["session"]: row for row in listed["sessions"]}
    return bool(rows[chat]["nvme_tokens"] >= LEAST)

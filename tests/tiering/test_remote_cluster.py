"""A store over four machines with networks of their own: partitions, delay, loss, kill -9 of each.

Needs the right to make network namespaces, and Mooncake; skipped with the reason elsewhere.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.errors import UnsupportedError
from sglang_ext.tiering.remote_mooncake import check_installed
from tests.mooncake import Process, await_that, end, program

_NET = "10.213.7"
_RPC, _ADMIN, _CLIENT = 50051, 9003, 50052
_LENT_BYTES = 256 * 2**20
_ROOT = Path(__file__).parents[2]


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


class Machine:
    """A network namespace with one address, on a switch."""

    def __init__(self, net: "Net", number: int) -> None:
        self.name, self.address = f"{net.name}-{number}", f"{_NET}.{number}"
        self._switch, self._port = net.switch, f"p{number}"
        run("ip", "netns", "add", self.name)
        run(
            *("ip", "link", "add", "eth0", "netns", self.name, "type", "veth"),
            *("peer", "name", self._port, "netns", self._switch),
        )
        run("ip", "-n", self._switch, "link", "set", self._port, "master", "br0", "up")
        run("ip", "-n", self.name, "addr", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            run("ip", "-n", self.name, "link", "set", device, "up")

    def start(self, *command: str, log: Any, **pipes: Any) -> Process:
        """Start a process on this machine."""
        inside = ["ip", "netns", "exec", self.name, *command]
        return subprocess.Popen(inside, stderr=log, cwd=_ROOT, **{"stdout": log, **pipes})

    def connect(self, connected: bool) -> None:
        """Plug its cable in, or out: nobody is told, packets are just lost."""
        state = "up" if connected else "down"
        run("ip", "-n", self._switch, "link", "set", self._port, state)

    def trouble(self, *kind: str) -> None:
        """Delay, lose or slow down what it sends; nothing: no more."""
        action = "replace" if kind else "del"
        run("tc", "-n", self.name, "qdisc", action, "dev", "eth0", "root", *kind)


class Net:
    """A switch, a master, a machine that lends memory, and two that serve."""

    def __init__(self, folder: Path) -> None:
        self.name = f"sgx{os.getpid()}"
        self.switch = f"{self.name}-switch"
        self.log = (folder / "log").open("ab")
        self.machines: list[Machine] = []
        self.processes: list[Process] = []
        run("ip", "netns", "add", self.switch)
        run("ip", "-n", self.switch, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", self.switch, "link", "set", "br0", "up")
        self.machines = [Machine(self, number) for number in range(1, 5)]
        self.start_master()
        self.start_memory()
        self.nodes = [Node(self, machine) for machine in self.machines[2:]]

    def start_master(self) -> None:
        machine = self.machines[0]
        self.master = machine.start(
            program("mooncake_master"),
            f"--rpc_address={machine.address}",
            f"--rpc_port={_RPC}",
            f"--metrics_host={machine.address}",
            f"--metrics_port={_ADMIN}",
            "--client_ttl=2",
            log=self.log,
        )
        self.processes.append(self.master)

    def start_memory(self) -> None:
        machine = self.machines[1]
        self.memory = machine.start(
            program("mooncake_client"),
            f"--host={machine.address}",
            f"--port={_CLIENT}",
            f"--global_segment_size={_LENT_BYTES}",
            f"--master_server_address={self.machines[0].address}:{_RPC}",
            "--metadata_server=P2PHANDSHAKE",
            log=self.log,
        )
        self.processes.append(self.memory)

    def stop(self) -> None:
        for process in self.processes:
            end(process)
        self.log.close()
        for name in [*(machine.name for machine in self.machines), self.switch]:
            run("ip", "netns", "del", name)


class Node:
    """A machine that serves, or would: it has the shared store and nothing else."""

    def __init__(self, net: Net, machine: Machine) -> None:
        self.machine = machine
        address = net.machines[0].address
        place = [f"{address}:{_RPC}", f"http://{address}:{_ADMIN}"]
        self._process = machine.start(
            *(sys.executable, "-m", "tests.tiering.remote_node", *place),
            log=net.log,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        net.processes.append(self._process)

    def does(self, action: str, first: int = 0, count: int = 0) -> Any:
        """Let it do something, and return its answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{action} {first} {count}\n".encode())
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def finds(self, first: int, count: int) -> bool:
        return all(self.does("get", first, count))

    def stores(self, first: int, count: int) -> bool:
        return all(self.does("put", first, count))


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Net]:
    try:
        check_installed()
    except UnsupportedError as error:
        pytest.skip(str(error))
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("no ip and tc (apt-get install iproute2)")
    try:
        run("ip", "netns", "add", f"sgx{os.getpid()}-probe")
        run("ip", "netns", "del", f"sgx{os.getpid()}-probe")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    net = Net(tmp_path_factory.mktemp("net"))
    try:
        yield net
    finally:
        net.stop()


def test_what_one_machine_wrote_another_finds(net: Net) -> None:
    one, two = net.nodes
    await_that(lambda: one.stores(0, 8))
    await_that(lambda: two.finds(0, 8))


def test_a_slow_and_lossy_link_gives_pages_or_misses(net: Net) -> None:
    one, two = net.nodes
    await_that(lambda: one.stores(100, 8))
    try:
        two.machine.trouble("netem", "delay", "20ms", "5ms", "loss", "2%")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this kernel cannot delay packets: {error.stderr.strip()}")
    for _ in range(3):
        two.does("get", 100, 8)
    two.machine.trouble()
    await_that(lambda: two.finds(100, 8))


def test_a_link_that_is_too_thin_is_given_up_at_the_deadline(net: Net) -> None:
    one, two = net.nodes
    await_that(lambda: one.stores(150, 16))
    net.machines[1].trouble("tbf", "rate", "200kbit", "burst", "8kb", "latency", "500ms")
    assert not two.finds(150, 16)
    assert not two.does("answers"), "nobody else waits for it"
    net.machines[1].trouble()
    await_that(lambda: two.finds(150, 16), 60)


@pytest.mark.trial(65)
def test_a_machine_that_is_cut_off_goes_on_and_comes_back(net: Net) -> None:
    one, two = net.nodes
    await_that(lambda: one.stores(200, 8))
    two.machine.connect(False)
    assert not two.finds(200, 8)
    await_that(lambda: not two.does("answers"))
    assert not two.stores(210, 2)
    assert one.finds(200, 8), "the others do not notice"
    two.machine.connect(True)
    await_that(lambda: two.finds(200, 8), 60)


def test_memory_that_is_cut_off_takes_its_pages_with_it(net: Net) -> None:
    one, _ = net.nodes
    await_that(lambda: one.stores(300, 8))
    net.machines[1].connect(False)
    assert not one.finds(300, 8)
    net.machines[1].connect(True)
    await_that(lambda: one.stores(300, 8) and one.finds(300, 8), 60)


@pytest.mark.parametrize("role", ["memory", "master"])
def test_a_killed_process_of_the_store_is_missed_and_replaced(net: Net, role: str) -> None:
    one, two = net.nodes
    await_that(lambda: one.stores(400, 8))
    end(getattr(net, role))
    assert not one.finds(400, 8)
    getattr(net, f"start_{role}")()
    await_that(lambda: one.stores(400, 8) and two.finds(400, 8), 60)


def test_a_machine_that_is_killed_leaves_its_pages_to_the_others(net: Net) -> None:
    one, two = net.nodes
    await_that(lambda: one.stores(500, 8) and one.finds(500, 8))
    end(one._process)
    await_that(lambda: two.finds(500, 8))

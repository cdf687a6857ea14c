"""A small Mooncake store for tests: a master, and processes that lend memory, on loopback."""

import importlib.util
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_ext.errors import UnsupportedError
from sglang_ext.gateway.machine import free_ports
from sglang_ext.tiering.remote_mooncake import P2P, MooncakeAddress, check_installed

__all__ = ["Cluster", "Process", "await_that", "end", "program", "start_cluster"]

_HOST = "127.0.0.1"
_READY_S = 20
# A peer that is gone is forgotten after so long.
_FORGET_S = 2

Process = subprocess.Popen[bytes]


class Cluster:
    """Processes of one store; each can be killed, frozen and started again."""

    def __init__(self, folder: Path) -> None:
        self._log = (folder / "mooncake.log").open("ab")
        self._rpc, self._admin = free_ports(2)
        self.address = MooncakeAddress(
            master=f"{_HOST}:{self._rpc}", admin=f"http://{_HOST}:{self._admin}"
        )
        self._lenders: list[Process] = []
        self.start_master()

    def start_master(self) -> None:
        """Start a master that knows nothing, on the same ports."""
        self.master = self._start(
            "mooncake_master",
            f"--rpc_port={self._rpc}",
            f"--rpc_address={_HOST}",
            f"--metrics_port={self._admin}",
            f"--metrics_host={_HOST}",
            f"--client_ttl={_FORGET_S}",
            # What nobody ends to write is given up, and its memory is used for others.
            "--put_start_discard_timeout_sec=1",
            "--put_start_release_timeout_sec=2",
        )

    def lend(self, size: int) -> Process:
        """Start a process that lends ``size`` bytes, and wait until the master knows."""
        await_that(lambda: self.segments() is not None)
        before = self.segments() or 0
        lender = self._start(
            "mooncake_client",
            f"--host={_HOST}",
            f"--port={free_ports(1)[0]}",
            f"--global_segment_size={size}",
            f"--master_server_address={self.address.master}",
            f"--metadata_server={P2P}",
        )
        self._lenders.append(lender)
        await_that(lambda: (self.segments() or 0) > before)
        return lender

    def segments(self) -> int | None:
        """Return how many pieces of memory the master knows; None where it does not answer."""
        try:
            url = f"{self.address.admin_url}/get_all_segments"
            with urllib.request.urlopen(url, timeout=1) as answer:
                return len(answer.read().split())
        except OSError:
            return None

    def puts_begun(self) -> float:
        """Return how many batches anybody began to write."""
        name = "master_batch_put_start_requests_total"
        with urllib.request.urlopen(f"{self.address.admin_url}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))

    def stop(self) -> None:
        """End every process."""
        for process in [*self._lenders, self.master]:
            end(process)
        self._log.close()

    def _start(self, name: str, *flags: str) -> Process:
        return subprocess.Popen([program(name), *flags], stdout=self._log, stderr=self._log)


def program(name: str) -> str:
    """Return where a program of Mooncake's package lies."""
    found = importlib.util.find_spec("mooncake")
    assert found is not None and found.submodule_search_locations
    binary = Path(found.submodule_search_locations[0]) / name
    binary.chmod(0o755)
    return str(binary)


def end(process: Process) -> None:
    """Kill a process, frozen or not, and wait until it is gone."""
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
    process.wait()


def start_cluster(folder: Path, lent: int) -> Cluster:
    """Start a store of ``lent`` bytes; skips the test, with the reason, where that cannot be."""
    try:
        check_installed()
    except UnsupportedError as error:
        pytest.skip(str(error))
    cluster = Cluster(folder)
    try:
        cluster.lend(lent)
    except BaseException:
        cluster.stop()
        raise
    return cluster


def await_that(holds: Callable[[], bool], seconds: float = _READY_S) -> None:
    """Return once something holds; fail when it never does."""
    end_s = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end_s, "it never happened"
        time.sleep(0.02)

"""A small Mooncake store for tests: a master, and processes that lend memory, on loopback."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_ext.errors import UnsupportedError
from sglang_ext.gateway.machine import free_ports
from sglang_ext.tiering.remote_mooncake import MooncakeAddress, check_installed

__all__ = ["Cluster", "await_that", "end", "start_cluster"]

_HOST = "127.0.0.1"
_READY_S = 20
# A peer that is gone is forgotten after so long.
_FORGET_S = 2
_LEND = """
import sys, threading
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
size, master = int(sys.argv[2]), sys.argv[1]
print(store.setup("127.0.0.1", "P2PHANDSHAKE", size, 1 << 24, "tcp", "", master), flush=True)
threading.Event().wait()
"""


class Cluster:
    """Processes of one store; each can be killed, frozen and started again."""

    def __init__(self, folder: Path) -> None:
        self._log = (folder / "mooncake.log").open("ab")
        self._rpc, self._admin = free_ports(2)
        self.address = MooncakeAddress(
            master=f"{_HOST}:{self._rpc}", admin=f"http://{_HOST}:{self._admin}"
        )
        self._lenders: list[subprocess.Popen[bytes]] = []
        self.start_master()

    def start_master(self) -> None:
        """Start a master that knows nothing, on the same ports."""
        found = importlib.util.find_spec("mooncake")
        assert found is not None and found.submodule_search_locations
        binary = Path(found.submodule_search_locations[0]) / "mooncake_master"
        binary.chmod(0o755)
        self.master = self._start(
            str(binary),
            f"--rpc_port={self._rpc}",
            f"--rpc_address={_HOST}",
            f"--metrics_port={self._admin}",
            f"--metrics_host={_HOST}",
            f"--client_ttl={_FORGET_S}",
        )

    def lend(self, size: int) -> subprocess.Popen[bytes]:
        """Start a process that lends ``size`` bytes, and wait until it does."""
        lender = self._start(sys.executable, "-c", _LEND, self.address.master, str(size))
        assert lender.stdout is not None
        line = lender.stdout.readline()
        assert line == b"0\n", f"a process could not lend its memory: {line!r}"
        self._lenders.append(lender)
        return lender

    def stop(self) -> None:
        """End every process."""
        for process in [*self._lenders, self.master]:
            end(process)
        self._log.close()

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, frozen or not, and wait until it is gone."""
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
    process.wait()


def start_cluster(folder: Path, lend: int) -> Cluster:
    """Start a store of ``lend`` bytes; skips the test, with the reason, where that cannot be."""
    try:
        check_installed()
    except UnsupportedError as error:
        pytest.skip(str(error))
    cluster = Cluster(folder)
    try:
        cluster.lend(lend)
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

"""Runs a Mooncake store on loopback for a benchmark."""

import contextlib
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from sglang_ext.gateway.machine import free_ports
from sglang_ext.tiering.remote_mooncake import P2P, MooncakeAddress

__all__ = ["mooncake_store"]


@contextlib.contextmanager
def mooncake_store(lent: int) -> Iterator[MooncakeAddress]:
    """Run a master and a process that lends memory."""
    rpc, admin, port = free_ports(3)
    address = MooncakeAddress(master=f"127.0.0.1:{rpc}", admin=f"http://127.0.0.1:{admin}")
    master = ["mooncake_master", f"--rpc_port={rpc}", f"--metrics_port={admin}"]
    lender = [
        "mooncake_client",
        f"--port={port}",
        "--host=127.0.0.1",
        f"--global_segment_size={lent}",
        f"--master_server_address={address.master}",
        f"--metadata_server={P2P}",
    ]
    processes = [_started(master, "--rpc_address=127.0.0.1"), _started(lender)]
    try:
        _await_memory(f"{address.admin_url}/get_all_segments")
        yield address
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _started(command: Sequence[str], *more: str) -> subprocess.Popen[bytes]:
    """Start a program of Mooncake's package."""
    found = find_spec("mooncake")
    assert found is not None and found.submodule_search_locations
    binary = Path(found.submodule_search_locations[0]) / command[0]
    binary.chmod(0o755)
    silent = subprocess.DEVNULL
    return subprocess.Popen([binary, *command[1:], *more], stdout=silent, stderr=silent)


def _await_memory(url: str) -> None:
    """Return once the master knows of memory to store in."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=1) as answer:
            if answer.read().split():
                return
        time.sleep(0.1)
    sys.exit("Mooncake's master has no memory to store in")

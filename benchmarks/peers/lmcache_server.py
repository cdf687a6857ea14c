"""LMCache's server process, which holds host memory and disk for an engine beside it.

Its connector inside the engine's process is no peer on a CPU: it serves without a single hit, and
says so only in the log.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.engines import StartError, last_error, stop, wait_until
from benchmarks.peers.base import PORT, Budget

__all__ = ["CHUNK_TOKENS", "LMCacheServer", "lmcache_server"]

CHUNK_TOKENS = 32
"""Finer than LMCache's default of 256, which loses an eighth of the scaled prompts at their end."""

_SETTINGS = {"LMCACHE_TRACK_USAGE": "false", "PYTHONHASHSEED": "0", "LMCACHE_DISABLE_BANNER": "1"}
_START_SECONDS = 120


@dataclass(frozen=True)
class LMCacheServer:
    """A running server: the port that engines dial, and what their environment needs."""

    pid: int
    port: int
    variables: Mapping[str, str]


@contextmanager
def lmcache_server(python: str, budget: Budget, folder: Path) -> Iterator[LMCacheServer]:
    """Run the server until the block ends. Raises StartError."""
    disk = folder / "lmcache"
    disk.mkdir()
    port, http = PORT + 1, PORT + 2
    command = [python, "-m", "lmcache.cli.main", "server", *_flags(budget, disk, port, http)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_SETTINGS},
            start_new_session=True,
        )
        try:
            if not wait_until(lambda: _answers(http), process, _START_SECONDS):
                raise StartError(f"LMCache's server did not start: {last_error(log)}")
            yield LMCacheServer(process.pid, port, _SETTINGS)
        finally:
            stop(process)


def _flags(budget: Budget, disk: Path, port: int, http: int) -> list[str]:
    adapter = {"type": "fs", "base_path": str(disk)}
    flags = {
        "--host": "127.0.0.1",
        "--port": port,
        "--http-port": http,
        "--prometheus-port": http + 1,
        "--chunk-size": CHUNK_TOKENS,
        "--l1-size-gb": budget.cpu_bytes / 2**30,
        "--l1-init-size-gb": 1,
        "--eviction-policy": "LRU",
        "--supported-transfer-mode": "auto",
        "--shm-name": f"rag_chat_{os.getpid()}",
        "--l2-adapter": json.dumps(adapter),
    }
    return [str(word) for pair in flags.items() for word in pair]


def _answers(port: int) -> bool:
    try:
        httpx.get(f"http://127.0.0.1:{port}/", timeout=2)
    except httpx.TransportError:
        return False
    return True

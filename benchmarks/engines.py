"""Starts servers side by side for a benchmark, on loopback, and ends them."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from sglang_ext.demo_model import demo_model_path
from sglang_ext.tenancy.keys import digest

__all__ = [
    "Answer",
    "Engine",
    "StartError",
    "ask",
    "cpu_seconds",
    "demo_flags",
    "engine",
    "last_error",
    "stop",
    "wait_until",
    "write_policy",
]

_START_SECONDS = 240
_STOP_SECONDS = 60
_ERROR = re.compile(r"^(\([^)]*\) )?(\S+ +\S+ +\[\S+\] )?\w*(\.\w+)*(Error|Exception)\b.*")


class StartError(SystemExit):
    """A server did not start; ends a benchmark that does not expect it."""


@dataclass(frozen=True)
class Engine:
    """A running server: where it listens and the headers that it wants."""

    name: str
    url: str
    pid: int
    headers: Mapping[str, str]


@dataclass(frozen=True)
class Answer:
    """What one streamed request took, in seconds, and what it used, in tokens."""

    ttft: float
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    text: str
    sources: Mapping[str, int]
    """Cached tokens by where they came from: device, host, storage."""


def demo_flags(tokens: int) -> list[str]:
    """Return SGLang's flags for the demo model with a pool of ``tokens`` on a CPU.

    Idle engines sleep, since two of them share the cores.
    """
    pool = ["--max-total-tokens", str(tokens), "--mem-fraction-static", "0.3"]
    cpu = ["--device", "cpu", "--sampling-backend", "pytorch", "--page-size", "16"]
    return ["--model-path", str(demo_model_path()), *cpu, *pool, "--sleep-on-idle"]


def write_policy(folder: Path, tenants: Sequence[str]) -> Path:
    """Write a policy in which the key of each tenant is ``key-<tenant>``."""
    lines = [f'  {name}: {{api_keys: ["{digest("key-" + name)}"]}}' for name in tenants]
    admin = f'admin_keys: ["{digest("key-admin")}"]'
    path = folder / "tenants.yaml"
    path.write_text("\n".join(["version: 1", admin, "tenants:", *lines]) + "\n", encoding="utf-8")
    return path


@contextmanager
def engine(
    name: str,
    module: str,
    port: int,
    flags: Sequence[str],
    key: str | None = None,
    *,
    python: str = sys.executable,
    variables: Mapping[str, str] | None = None,
) -> Iterator[Engine]:
    """Run ``python -m module`` until the block ends; its log is printed where it fails to start.

    ``variables`` are added to its environment.
    """
    command = [python, "-m", module, *flags, "--host", "127.0.0.1", "--port", str(port)]
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **(variables or {})},
            start_new_session=True,
        )
        try:
            _wait_ready(f"http://127.0.0.1:{port}", process, log)
            yield Engine(name, f"http://127.0.0.1:{port}", process.pid, headers)
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server that leads its own process group, and whatever it left in the group."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU seconds that these processes and all below them have used so far."""
    total = 0.0
    for pid in pids:
        root = psutil.Process(pid)
        times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
        total += sum(each.user + each.system for each in times)
    return total


def ask(client: httpx.Client, server: Engine, text: str, tokens: int, **sampling: Any) -> Answer:
    """Stream one greedy completion through the native route."""
    parameters = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **sampling}
    body = {"text": text, "stream": True, "sampling_params": parameters}
    start = time.perf_counter()
    first = 0.0
    last: dict[str, Any] = {}
    with client.stream("POST", server.url + "/generate", json=body, headers=server.headers) as r:
        r.raise_for_status()
        for line in r.iter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - start
                last = json.loads(line[6:])
    meta = last["meta_info"]
    return Answer(
        ttft=first,
        seconds=time.perf_counter() - start,
        prompt_tokens=meta["prompt_tokens"],
        cached_tokens=meta["cached_tokens"],
        output_tokens=meta["completion_tokens"],
        text=last["text"],
        sources=_sources(meta),
    )


def _sources(meta: Mapping[str, Any]) -> dict[str, int]:
    details = meta.get("cached_tokens_details") or {}
    return {tier: details.get(tier, 0) for tier in ("device", "host", "storage")}


def _wait_ready(url: str, process: subprocess.Popen[bytes], log: Any) -> None:
    if wait_until(lambda: _healthy(url), process, _START_SECONDS):
        return
    log.seek(0)
    sys.stderr.write(log.read()[-5000:])
    raise StartError(f"the server at {url} did not start: {last_error(log)}")


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Return whether ``process`` became ready in time, and did not end before."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        if ready():
            return True
        time.sleep(0.5)
    return False


def last_error(log: Any) -> str:
    """Return the last line of a log that names an exception, else its last line."""
    log.seek(0)
    lines = [line.strip() for line in log if line.strip()]
    errors = [line for line in lines if _ERROR.match(line)]
    return (errors or lines or ["its log is empty"])[-1][:300]


def _healthy(url: str) -> bool:
    try:
        return httpx.get(url + "/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False

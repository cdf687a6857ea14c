"""Starts the real server for a test, and proves afterwards that nothing is left of it."""

import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

READY = "The server is fired up and ready to roll!"
# What SGLang logs when its idle invariant (design.md, section 3) does not hold.
_LEAK = re.compile(r"memory leak detected|Pool leak|leak detected", re.IGNORECASE)
# Threads that spin while they wait starve each other when a test has more servers than cores.
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
START_SECONDS = 240
STOP_SECONDS = 10


def free_port() -> int:
    """Return a port of 127.0.0.1 that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """One server of a test run; ``lines`` is everything it has printed so far."""

    def __init__(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self.port = free_port()
        self.lines: list[str] = []
        self._news: queue.Queue[str | None] = queue.Queue()
        command = [sys.executable, "-m", module, *arguments, "--port", str(self.port)]
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env={**os.environ, **_ENVIRONMENT, **(environment or {})},
        )
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def url(self) -> str:
        """Where the server listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The launcher's process id."""
        return self._process.pid

    def wait_ready(self) -> None:
        """Return once the server answers; fail with its output where it ends instead."""
        self.wait_for(READY)

    def wait_for(self, text: str, seconds: float = START_SECONDS) -> str:
        """Return the next line that contains ``text``."""
        while True:
            line = self._news.get(timeout=seconds)
            assert line is not None, "the server ended:\n" + self.tail()
            if text in line:
                return line

    def wait_exit(self, seconds: float = START_SECONDS) -> int:
        """Return the exit status of a server that ends by itself."""
        return self._process.wait(timeout=seconds)

    def stop(self, sent: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal, and return the exit status once every process of the server is gone."""
        family = self._family()
        os.kill(self.pid, sent)
        status = self._process.wait(timeout=STOP_SECONDS)
        _, alive = psutil.wait_procs(family, timeout=STOP_SECONDS)
        assert not alive, f"left behind: {alive}"
        return status

    def kill(self) -> None:
        """End whatever is left, after a test that failed."""
        for process in self._family():
            process.kill()

    def tail(self, count: int = 60) -> str:
        """Return the last lines of the log."""
        return "".join(self.lines[-count:])

    def resident_bytes(self) -> int:
        """Return the memory of all its processes that is in RAM."""
        return sum(process.memory_info().rss for process in self._family())

    def leaks(self) -> list[str]:
        """Return the lines in which SGLang's own invariant check complained."""
        return [line for line in self.lines if _LEAK.search(line)]

    def _family(self) -> list[psutil.Process]:
        try:
            launcher = psutil.Process(self.pid)
            return [*launcher.children(recursive=True), launcher]
        except psutil.NoSuchProcess:
            return []

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line)
            self._news.put(line)
        self._news.put(None)


@contextmanager
def running(
    arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[ServerProcess]:
    """Yield a ready server of ours; afterwards no process and no leaked page is left."""
    server = ServerProcess("sglang_ext.launch_server", arguments, environment)
    try:
        server.wait_ready()
        yield server
        server.stop()
        assert not server.leaks(), server.leaks()
    finally:
        server.kill()


@dataclass(frozen=True)
class Client:
    """Talks to a server with one key."""

    url: str
    key: str

    def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        """Send JSON; header names take ``_`` for ``-``."""
        return httpx.post(self.url + path, json=body, headers=self._headers(headers), timeout=180)

    def put(self, path: str, body: object, **headers: str) -> httpx.Response:
        """Send JSON."""
        return httpx.put(self.url + path, json=body, headers=self._headers(headers), timeout=180)

    def delete(self, path: str) -> httpx.Response:
        """Delete something."""
        return httpx.delete(self.url + path, headers=self._headers({}), timeout=180)

    def get(self, path: str, **headers: str) -> httpx.Response:
        """Fetch a route."""
        return httpx.get(self.url + path, headers=self._headers(headers), timeout=60)

    def events(self, path: str, body: object, **headers: str) -> Iterator[str]:
        """Send JSON and yield the data of every server-sent event as it comes."""
        with httpx.stream(
            "POST", self.url + path, json=body, headers=self._headers(headers), timeout=180
        ) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    yield line.removeprefix("data: ")

    def stream(self, path: str, body: object) -> list[str]:
        """Send JSON and return the data of every server-sent event."""
        return list(self.events(path, body))

    def generate(self, text: str, *, tokens: int = 1, **fields: object) -> dict[str, object]:
        """Call the native route and return its answer."""
        sampling = {"temperature": 0, "max_new_tokens": tokens}
        response = self.post("/generate", {"text": text, "sampling_params": sampling, **fields})
        response.raise_for_status()
        answer = response.json()
        assert isinstance(answer, dict)
        return answer

    def cached(self, text: str, **fields: object) -> int:
        """Send a prompt and return how many of its tokens came from the cache."""
        meta = self.generate(text, **fields)["meta_info"]
        assert isinstance(meta, dict)
        return int(meta["cached_tokens"])

    def _headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        extra = {name.replace("_", "-"): value for name, value in headers.items()}
        return {"authorization": f"Bearer {self.key}", **extra}


def policy_file(folder: Path, tenants: Sequence[str], extra: str = "") -> Path:
    """Write a policy for ``tenants``; the key of each is ``key-<tenant>``, and of the admin too."""
    from sglang_ext.tenancy.keys import digest

    lines = ["version: 1", f'admin_keys: ["{digest("key-admin")}"]', "tenants:"]
    lines += [f'  {name}: {{api_keys: ["{digest("key-" + name)}"]}}' for name in tenants]
    path = folder / "tenants.yaml"
    path.write_text("\n".join([*lines, extra]) + "\n", encoding="utf-8")
    return path

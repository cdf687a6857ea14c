"""A small server with all tiers that keeps usage and logs JSON, for what operators see."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

from sglang_ext.tenancy.keys import digest
from tests.serving.server import Client, ServerProcess

__all__ = ["TENANTS", "Observed", "wait_until"]

TENANTS = ("a", "b", "c")
_FLAGS = ("--max-total-tokens", "3000", "--mem-fraction-static", "0.3", "--sleep-on-idle")
_SECONDS = 60
_QUOTAS = {"a": "90%", "b": "1000tok", "c": "50%"}


def wait_until(holds: Callable[[], bool]) -> None:
    """Return once ``holds``; fail after a minute."""
    end = time.monotonic() + _SECONDS
    while not holds():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.1)


class Observed:
    """The server, which a test may kill and start again on the same usage file."""

    def __init__(self, folder: Path) -> None:
        self.usage = folder / "usage.db"
        self._policy = folder / "tenants.yaml"
        self._ended = False
        lines = [
            f'  {name}: {{api_keys: ["{digest(f"key-{name}")}"], quota: {{hbm: {quota}}}}}'
            for name, quota in _QUOTAS.items()
        ]
        text = [
            "version: 1",
            f'admin_keys: ["{digest("key-admin")}"]',
            f"tiers: {{cpu: {{size: 150MB}}, nvme: {{size: 400MB, path: {folder / 'pages'}}}}}",
            "tenants:",
            *lines,
        ]
        self._policy.write_text("\n".join(text) + "\n", encoding="utf-8")
        self.start()

    def start(self) -> None:
        """Start the server, on a new port, and return once it answers."""
        own = ["--tenant-policy", str(self._policy), "--usage-db", str(self.usage), "--log-json"]
        self.server = ServerProcess("sglang_ext.launch_server", [*own, *_FLAGS])
        self.server.wait_ready()

    def client(self, tenant: str) -> Client:
        """Return a client with the tenant's key; ``admin`` is the operator."""
        return Client(self.server.url, f"key-{tenant}")

    def end(self, sent: signal.Signals = signal.SIGTERM) -> None:
        """Stop the server and fail where it left something behind; again is a no-op."""
        if self._ended:
            return
        self._ended = True
        try:
            self.server.stop(sent)
            assert not self.server.leaks(), self.server.leaks()
        finally:
            self.server.kill()

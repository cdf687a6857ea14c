"""The whole launcher over engines of a few lines: signals, kills and changes of the policy."""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from sglang_ext.console import ask_server
from sglang_ext.gateway.machine import free_ports
from tests.gateway.upstreams import POLICY

_SCRIPT = Path(__file__).with_name("served.py")
_ROOT = _SCRIPT.parents[2]


class Served:
    """A running gateway process; ``lines`` is what it has printed."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.policy = folder / "tenants.yaml"
        self.policy.write_text(yaml.safe_dump(POLICY), encoding="utf-8")
        self.port = free_ports(1)[0]
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, str(_SCRIPT), str(self.policy), str(self.port)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(_ROOT), **environment},
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines += self.process.stderr

    def send(self, method: str, path: str, key: str = "key-admin", **request: Any) -> Any:
        headers = {"authorization": f"Bearer {key}", **request.pop("headers", {})}
        url = f"http://127.0.0.1:{self.port}{path}"
        return httpx.request(method, url, headers=headers, timeout=20, **request)

    def told(self, engine: str) -> dict[str, Any]:
        found: dict[str, Any] = self.send("GET", "/told", headers={"x-engine": engine}).json()
        return {"tenants": yaml.safe_load(found["told"])["tenants"], "steps": found["steps"]}

    def rows(self) -> dict[str, dict[str, Any]]:
        rows = self.send("GET", "/ext/v1/engines").json()["engines"]
        return {row["engine"]: row for row in rows}

    def family(self) -> list[psutil.Process]:
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@contextmanager
def serving(folder: Path, asked: str = "/ready", **environment: str) -> Iterator[Served]:
    """Run a gateway; ``asked``: the route that says 200 once it can be used."""
    served = Served(folder, **environment)
    try:
        until(lambda: _answers(served, asked))
        yield served
    finally:
        served.process.kill()
        served.process.wait()


@pytest.fixture(scope="module")
def fails(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file is there, no engine starts."""
    return tmp_path_factory.mktemp("fails") / "fails"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, fails: Path) -> Iterator[Served]:
    """The gateway of the tests that leave it running."""
    with serving(tmp_path_factory.mktemp("served"), FAIL_FILE=str(fails)) as served:
        yield served


def _answers(served: Served, route: str) -> bool:
    assert served.process.poll() is None, "".join(served.lines)
    try:
        return bool(served.send("GET", route).status_code == 200)
    except httpx.TransportError:
        return False


@pytest.mark.parametrize(
    ("sent", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)], ids=["term", "ctrl-c"]
)
def test_a_signal_ends_the_gateway_and_its_engines(
    tmp_path: Path, sent: signal.Signals, status: int
) -> None:
    with serving(tmp_path) as served:
        family = served.family()
        assert len(family) == 3
        served.process.send_signal(sent)
        assert served.process.wait(timeout=15) == status, "".join(served.lines)
        assert not psutil.wait_procs(family, 5)[1]


def test_nothing_is_left_of_a_gateway_that_is_killed(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        family = served.family()
        served.process.kill()
        served.process.wait()
        assert not psutil.wait_procs(family, 10)[1]


def test_a_killed_engine_is_started_again_with_the_policy_in_force(served: Served) -> None:
    assert served.send("GET", "/v1/models", "key-bank").json()["engine"] == "bank"
    added = served.send("PUT", "/ext/v1/tenants/x", json={"weight": 2})
    assert added.status_code == 200, added.text
    pid = served.rows()["shared"]["pid"]
    os.kill(pid, signal.SIGKILL)
    until(lambda: served.rows()["shared"]["state"] != "ready")
    down = served.send("POST", "/generate", "key-a")
    assert down.status_code == 503
    assert served.send("GET", "/v1/models", "key-bank").status_code == 200
    refused = served.send("PUT", "/ext/v1/tenants/y", json={})
    assert refused.status_code == 400
    assert "shared is not running" in refused.text
    until(lambda: served.rows()["shared"]["state"] == "ready")
    row = served.rows()["shared"]
    assert row["pid"] != pid
    assert row["restarts"] == 1
    assert served.rows()["bank"]["restarts"] == 0
    assert set(served.told("shared")["tenants"]) >= {"a", "x"}
    page = served.send("GET", "/metrics").text
    assert 'sglang_ext_engine_restarts_total{engine="shared"} 1.0' in page
    assert 'sglang_ext_ready_engines{engine="bank"} 1.0' in page


@pytest.mark.parametrize(("engine", "name"), [(None, "shared"), ("bank", "bank")])
def test_a_command_asks_the_engine_that_it_names(
    served: Served, engine: str | None, name: str
) -> None:
    url = f"http://127.0.0.1:{served.port}"
    options = argparse.Namespace(url=url, key="key-admin", engine=engine)
    assert json.loads(ask_server(options, "/ext/v1/overview", {}))["engine"] == name


def test_a_change_reaches_all_engines_or_none(served: Served) -> None:
    version = served.send("GET", "/ext/v1/policy").json()["version"]
    refused = served.send("PUT", "/ext/v1/tenants/refuse-me", json={})
    assert refused.status_code == 400
    assert "no room" in refused.text
    assert served.send("GET", "/ext/v1/policy").json()["version"] == version
    steps = {name: served.told(name)["steps"] for name in ("shared", "bank")}
    assert {taken[-1]["step"] for taken in steps.values()} == {"check"}
    assert "refuse-me" not in served.policy.read_text(encoding="utf-8")

    answer = served.send("PUT", "/ext/v1/tenants/x", json={"weight": 2}).json()
    assert answer["saved"] is True
    assert answer["refused_requests"] == 2
    assert "x" in yaml.safe_load(served.policy.read_text(encoding="utf-8"))["tenants"]
    assert set(served.told("shared")["tenants"]) >= {"a", "x"}
    assert set(served.told("bank")["tenants"]) == {"bank"}

    gone = served.send("DELETE", "/ext/v1/tenants/x?requests=abort").json()["removed"]
    assert gone == {
        "aborted_requests": {"x": 2},
        "owners": {"t:x": {"freed": {"hbm": 4}, "left": {"hbm": 0}}},
    }
    last = served.told("bank")["steps"][-1]
    assert (last["step"], last["requests"]) == ("remove", "abort")


def test_the_file_is_read_again_at_sighup(served: Served) -> None:
    policy = {**POLICY, "tenants": {**POLICY["tenants"], "late": {}}}  # type: ignore[dict-item]
    served.policy.write_text(yaml.safe_dump(policy), encoding="utf-8")
    served.process.send_signal(signal.SIGHUP)
    until(lambda: "late" in served.told("shared")["tenants"])
    assert "late" not in served.told("bank")["tenants"]


def test_an_engine_that_cannot_start_ends_the_launcher_with_its_status(tmp_path: Path) -> None:
    fails = tmp_path / "fails"
    fails.touch()
    served = Served(tmp_path, FAIL_FILE=str(fails))
    try:
        assert served.process.wait(timeout=30) == 3, "".join(served.lines)
    finally:
        served.process.kill()


def test_a_restart_that_fails_is_tried_again(served: Served, fails: Path) -> None:
    fails.touch()
    os.kill(served.rows()["bank"]["pid"], signal.SIGKILL)
    until(lambda: served.rows()["bank"]["restarts"] >= 2)
    assert served.process.poll() is None
    fails.unlink()
    until(lambda: served.rows()["bank"]["state"] == "ready")

"""Starting and stopping: what is refused with one line, and what a signal leaves behind."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.serving.conftest import SMALL_POOL
from tests.serving.server import Client, ServerProcess, policy_file

pytestmark = pytest.mark.serving


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """A policy with one tenant."""
    return policy_file(tmp_path, ["a"])


def _refusal(policy: Path, *flags: str, **environment: str) -> str:
    """Return the one line that a refused start prints; it must come without a traceback."""
    command = [sys.executable, "-m", "sglang_ext.launch_server", "--tenant-policy", str(policy)]
    finished = subprocess.run(
        [*command, *flags],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )
    assert finished.returncode == 2, finished.stderr
    assert "Traceback" not in finished.stderr
    return finished.stderr.strip().splitlines()[-1]


def test_a_mode_without_identity_is_refused(policy: Path) -> None:
    line = _refusal(policy, "--api-key", "secret")
    assert "--api-key" in line
    assert "secret" not in line


def test_the_rust_server_is_refused(policy: Path) -> None:
    assert "SGLANG_RUST_SERVER" in _refusal(policy, SGLANG_RUST_SERVER="1")


def test_a_plugin_that_did_not_run_is_refused(policy: Path) -> None:
    """SGLang would go on without it, that is, without isolation."""
    assert "did not run" in _refusal(policy, SGLANG_PLUGINS="something_else")


def test_a_taken_port_is_refused(policy: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port} on 127.0.0.1 is taken" in _refusal(policy, "--port", str(port))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("version: 1\ntenants: {a: {api_kees: []}}", "tenants.a.api_kees"),
        ("version: 1\ntiers: {remote: {}}", "tiers.remote.backend"),
        ("version: [", "YAML"),
    ],
)
def test_a_wrong_policy_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(text, encoding="utf-8")
    assert words in _refusal(path)


TWO_FLOORS = "version: 1\ntenants: {a: {reserve: {hbm: %s}}, b: {reserve: {hbm: %s}}}"


@pytest.mark.trial(26)
@pytest.mark.parametrize(
    ("first", "second", "path", "found"),
    [
        ("60%", "50%", "tenants", "sums to 110%, expected at most 100%"),
        ("15000tok", "6000tok", "tenants", "sums to 21000 tokens, expected at most the 20000"),
        ("1TB", "1GB", "tenants.a.reserve.hbm", "expected at most the 20000"),
        ("10furlong", "1%", "tenants.a.reserve.hbm", "10furlong"),
    ],
)
def test_trial_26_floors_above_the_capacity_are_refused(
    tmp_path: Path, first: str, second: str, path: str, found: str
) -> None:
    """Percentages before the engine starts, tokens and bytes against the pool that it has."""
    policy = tmp_path / "tenants.yaml"
    policy.write_text(TWO_FLOORS % (first, second), encoding="utf-8")
    server = ServerProcess(
        "sglang_ext.launch_server", ["--tenant-policy", str(policy), *SMALL_POOL]
    )
    try:
        line = server.wait_for(found)
        assert f"{path}: " in line
        assert server.wait_exit() != 0
    finally:
        server.kill()


def test_a_missing_policy_is_refused(tmp_path: Path) -> None:
    assert "no-such-file" in _refusal(tmp_path / "no-such-file.yaml")


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_a_signal_ends_every_child_in_time(policy: Path, sent: signal.Signals) -> None:
    """A long answer is still being written: it may not hold the server open."""
    server = ServerProcess(
        "sglang_ext.launch_server", ["--tenant-policy", str(policy), *SMALL_POOL]
    )
    try:
        server.wait_ready()
        client = Client(server.url, "key-a")
        sampling = {"max_new_tokens": 4000, "ignore_eos": True}
        events = client.events(
            "/generate", {"text": "Count:", "stream": True, "sampling_params": sampling}
        )
        next(events)
        server.stop(sent)
        with pytest.raises(httpx.HTTPError):
            list(events)
    finally:
        server.kill()


def test_without_a_policy_the_installed_plugin_changes_nothing() -> None:
    """Stock SGLang: no key is asked for, and its own cache serves."""
    from sglang_ext.demo_model import demo_model_path

    flags = ["--model-path", str(demo_model_path()), "--device", "cpu", *SMALL_POOL]
    server = ServerProcess("sglang.launch_server", [*flags, "--sampling-backend", "pytorch"])
    try:
        server.wait_ready()
        body = {"text": "hello", "sampling_params": {"max_new_tokens": 1}}
        answer = httpx.post(server.url + "/generate", json=body, timeout=60)
        assert answer.status_code == 200
        assert "/" not in answer.json()["meta_info"]["id"]
        assert any("source=default" in line for line in server.lines)
        server.stop()
    finally:
        server.kill()

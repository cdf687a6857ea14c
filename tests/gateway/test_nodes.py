"""Engines of other machines: what names them, how they join, and that they may be off."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_ext.errors import NodesError, PolicyError
from sglang_ext.gateway.machine import free_ports
from sglang_ext.gateway.nodes import read_nodes, read_secret
from sglang_ext.gateway.plan import narrowed, plan_engines
from sglang_ext.launch_flags import own_arguments
from sglang_ext.tenancy.loader import build_policy
from tests.gateway.test_serve import Served, serving, until

_SCRIPT = Path(__file__).with_name("served.py")
SECRET = "5e" * 32


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "gateway.secret"
    path.write_text(SECRET + "\n")
    path.chmod(0o600)
    return path


def written(folder: Path, text: str) -> Path:
    path = folder / "nodes.yaml"
    path.write_text(text)
    return path


def test_a_file_names_nodes_and_their_secret(tmp_path: Path, secret: Path) -> None:
    lines = "nodes:\n  n1: http://10.0.0.11:30000\n  n2: https://kv2.example.org:30000/\n"
    nodes = read_nodes(written(tmp_path, f"secret: {secret.name}\n{lines}"))
    assert nodes.secret == SECRET
    urls = {"n1": "http://10.0.0.11:30000", "n2": "https://kv2.example.org:30000"}
    assert nodes.urls == urls
    assert SECRET not in repr(nodes)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("", "secret: missing"),
        ("nodes: {}", "nodes: none, expected one"),
        ("nodes: [a]", "nodes: .*expected a mapping"),
        ("nodes: {n1: 10.0.0.1}", "nodes.n1: found .*expected http://HOST:PORT"),
        ("nodes: {n1: 'http://host'}", "nodes.n1: found .*expected http://HOST:PORT"),
        ("nodes: {n1: 'http://host:99999'}", "nodes.n1: found .*expected http://HOST:PORT"),
        ("nodes: {n1: 'http://host:1/path'}", "nodes.n1: found .*expected http://HOST:PORT"),
        ("nodes: {n1: 'http://user@host:1'}", "nodes.n1: found .*expected http://HOST:PORT"),
        ("nodes: {n1: 'ftp://host:1'}", "nodes.n1: found .*expected http://HOST:PORT"),
        ("nodes: {n1: 7}", "nodes.n1: found 7"),
        ("nodes: {a b: 'http://host:1'}", "expected a name of 1 to 64"),
        ("nodes: {shared-1: 'http://host:1'}", "nodes.shared-1: .*choose another"),
        ("nodes: {gateway: 'http://host:1'}", "nodes.gateway: .*choose another"),
        ("nodes: {n1: 'http://h:1', n2: 'http://h:1'}", "two have one URL"),
        ("nodes: {n1: 'http://h:1'}\nsecrets: x", "did you mean secret"),
        ("nodes: {", "line"),
    ],
)
def test_what_names_no_node_is_refused(
    tmp_path: Path, secret: Path, lines: str, words: str
) -> None:
    text = f"secret: {secret}\n{lines}" if lines else "nodes: {n1: 'http://h:1'}"
    with pytest.raises(NodesError, match=words) as refused:
        read_nodes(written(tmp_path, text))
    assert "nodes.yaml: " in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NodesError, match=r"no\.yaml: No such file"):
        read_nodes(tmp_path / "no.yaml")
    with pytest.raises(NodesError, match="openssl rand -hex 32"):
        read_secret(tmp_path / "no.secret")


def test_a_secret_that_is_none_is_refused(secret: Path) -> None:
    for text in ("", "short", "with a space" * 9, "two\n" * 20, "\u00e9" * 40):
        secret.write_text(text, encoding="utf-8")
        with pytest.raises(NodesError, match="openssl rand"):
            read_secret(secret)
    secret.write_text(SECRET)
    secret.chmod(0o640)
    with pytest.raises(NodesError, match="mode is 0640, must be 0600"):
        read_secret(secret)


def test_nodes_are_replicas_with_tiers_of_their_own() -> None:
    tenants = {"a": {}, "bank": {"isolation": "dedicated", "gpus": [0]}}
    tiers = {"cpu": {"size": "10GB"}}
    policy = build_policy({"version": 1, "tenants": tenants, "tiers": tiers})
    specs = plan_engines(policy, 1, (), {"n1": "http://h:1"})
    assert [spec.name for spec in specs] == ["shared", "n1", "bank"]
    document = narrowed(policy, specs[1], specs)
    assert list(document["tenants"]) == ["a"]
    alone = plan_engines(policy, 0, (), {"n1": "http://h:1"})
    assert [spec.name for spec in alone] == ["n1", "bank"]
    # What is divided is what runs on this machine.
    assert narrowed(policy, alone[1], alone)["tiers"]["cpu"]["size"] == "10000000000B"
    with pytest.raises(PolicyError, match=r"tenants\.bank: the name of"):
        plan_engines(policy, 1, (), {"bank": "http://h:1"})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--engines", "0"], "expected a number from 1 on"),
        (["--engines", "-1", "--nodes", "n"], "expected a number from 0 on"),
        (["--gateway-secret", "s", "--nodes", "n"], "a node is one engine"),
        (["--gateway-secret", "s", "--engines", "2"], "a node is one engine"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        own_arguments(["--tenant-policy", "all.yaml", *words])
    assert message in capsys.readouterr().err


@contextmanager
def node(secret: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run an engine that the gateway did not start."""
    command = [sys.executable, str(_SCRIPT), "node", str(secret), str(port)]
    environment = {**os.environ, "PYTHONPATH": str(_SCRIPT.parents[2])}
    process = subprocess.Popen(command, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def steps_of(served: Served, name: str) -> list[dict[str, Any]]:
    return list(served.told(name)["steps"])


def state(served: Served, name: str) -> str:
    return str(served.rows()[name]["state"])


def test_a_node_joins_leaves_and_comes_back(tmp_path: Path, secret: Path) -> None:
    port = free_ports(1)[0]
    file = written(tmp_path, f"secret: {secret}\nnodes: {{n1: 'http://127.0.0.1:{port}'}}\n")
    with serving(tmp_path, "/health", NODES=str(file)) as served:
        until(lambda: state(served, "shared") == "ready")
        row = served.rows()["n1"]
        assert (row["state"], row["pid"], row["restarts"]) == ("away", None, 0)
        assert row["url"] == f"http://127.0.0.1:{port}"
        assert "n1" in row["problem"]
        with node(secret, port) as process:
            until(lambda: state(served, "n1") == "ready")
            check, apply, remove = steps_of(served, "n1")
            assert [apply["step"], remove["step"]] == ["apply", "remove"]
            document = check["document"]
            assert set(document["tenants"]) == {"a", "b"}
            # Its machine is its own business.
            assert document["tiers"] == {"cpu": {"size": "7GB"}}
            added = served.send("PUT", "/ext/v1/tenants/x", json={"weight": 2})
            assert added.status_code == 200, added.text
            assert set(steps_of(served, "n1")[3]["document"]["tenants"]) == {"a", "b", "x"}
            refused = served.send("PUT", "/ext/v1/tenants/refuse-me", json={})
            assert refused.status_code == 400
            process.kill()
            process.wait()
        until(lambda: state(served, "n1") == "away")
        for _ in range(4):
            assert served.send("POST", "/generate", "key-a").json()["engine"] == "shared"
        # What changes while it is away, it is told when it is back.
        assert served.send("DELETE", "/ext/v1/tenants/x").status_code == 200
        with node(secret, port):
            until(lambda: state(served, "n1") == "ready")
            first = steps_of(served, "n1")[0]["document"]
            assert set(first["tenants"]) == {"a", "b"}
            assert served.rows()["n1"]["restarts"] == 1
            served.process.send_signal(signal.SIGTERM)
            assert served.process.wait(timeout=15) == 0


def test_a_node_with_another_secret_stays_away(tmp_path: Path, secret: Path) -> None:
    port = free_ports(1)[0]
    other = tmp_path / "other.secret"
    other.write_text("6f" * 32)
    other.chmod(0o600)
    file = written(tmp_path, f"secret: {secret}\nnodes: {{n1: 'http://127.0.0.1:{port}'}}\n")
    with node(other, port), serving(tmp_path, "/health", NODES=str(file)) as served:
        until(lambda: "403" in str(served.rows()["n1"]["problem"]))
        assert "--gateway-secret" in served.rows()["n1"]["problem"]
        assert state(served, "n1") == "away"


def test_a_gateway_without_its_secret_does_not_start(tmp_path: Path, secret: Path) -> None:
    secret.unlink()
    policy = tmp_path / "tenants.yaml"
    policy.write_text(yaml.safe_dump({"version": 1, "tenants": {"a": {}}}), encoding="utf-8")
    file = written(tmp_path, f"secret: {secret}\nnodes: {{n1: 'http://127.0.0.1:1'}}\n")
    words = ["-m", "sglang_ext.launch_server", "--tenant-policy", str(policy)]
    found = subprocess.run(
        [sys.executable, *words, "--engines", "0", "--nodes", str(file)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 2
    assert "gateway.secret: No such file or directory, expected one line" in found.stderr

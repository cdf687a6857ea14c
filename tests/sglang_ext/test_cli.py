"""The command ``sglang-ext``."""

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from sglang_ext import cli
from sglang_ext.errors import DemoModelError
from sglang_ext.tenancy.keys import KeyRing, digest
from sglang_ext.tenancy.loader import parse_policy

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "tenants.yaml"


def make_demo_module(monkeypatch: pytest.MonkeyPatch, problem: str = "") -> None:
    def demo_model_path() -> Path:
        if problem:
            raise DemoModelError(problem)
        return Path("/models/demo")

    module = types.ModuleType("sglang_ext.demo_model")
    monkeypatch.setattr(module, "demo_model_path", demo_model_path, raising=False)
    monkeypatch.setitem(sys.modules, "sglang_ext.demo_model", module)


def test_check_policy_shows_what_the_file_means(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check-policy", str(EXAMPLE)]) == 0
    out, err = capsys.readouterr()
    rows = [line.split() for line in out.splitlines()]
    assert ["hr", "shared", "g:intranet", "1"] in rows
    assert ["system", "private", "t:system", "0"] in rows
    assert ["unknown_key", "reject"] in rows
    assert err == ""


def test_output_that_is_not_a_terminal_is_plain(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["check-policy", str(EXAMPLE)])
    assert capsys.readouterr().out.isascii()


def test_check_policy_shows_no_digest(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["check-policy", str(EXAMPLE)])
    assert digest("demo-key-acme")[7:20] not in capsys.readouterr().out


def test_example_knows_the_demo_keys() -> None:
    ring = KeyRing(parse_policy(EXAMPLE.read_text()))
    for name in ("acme", "globex", "sales", "hr"):
        principal = ring.lookup(f"demo-key-{name}")
        assert principal is not None and principal.tenant == name
    admin = ring.lookup("demo-key-admin")
    assert admin is not None and admin.is_admin


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("version: 1\ntenants: {acme: {qouta: 1}}", "tenants.acme.qouta: unknown field"),
        ("version: [", "not valid YAML at line 1"),
        ("", "the file is empty"),
    ],
)
def test_wrong_policy_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, problem: str
) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(text)
    assert cli.main(["check-policy", str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"{file}: {problem}")
    assert err.count("\n") == 1


def test_missing_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check-policy", "missing.yaml"]) == 2
    assert capsys.readouterr().err.startswith("missing.yaml: cannot be read: No such file")


def test_keygen_prints_a_key_and_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["keygen", "acme"]) == 0
    out = capsys.readouterr().out
    key, line = (text.strip() for text in out.splitlines() if text.startswith("    "))
    assert line == f'- "{digest(key)}"'
    assert "tenants.acme.api_keys" in out
    policy = parse_policy(f"version: 1\ntenants:\n  acme:\n    api_keys:\n    {line}\n")
    principal = KeyRing(policy).lookup(key)
    assert principal is not None and principal.tenant == "acme"


def test_keygen_for_an_admin(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["keygen", "--admin"]) == 0
    assert "below admin_keys:" in capsys.readouterr().out


@pytest.mark.parametrize("tenant", ["system", "a b", "", "sgx-abc"])
def test_keygen_refuses_a_name(tenant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["keygen", tenant]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("TENANT: found ")


def test_demo_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    make_demo_module(monkeypatch)
    assert cli.main(["demo-model"]) == 0
    assert capsys.readouterr().out == "/models/demo\n"


def test_demo_model_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_demo_module(monkeypatch, problem="no network")
    assert cli.main(["demo-model"]) == 1
    assert capsys.readouterr() == ("", "no network\n")


def test_interrupt_exits_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "load_policy", interrupted)
    assert cli.main(["check-policy", "x"]) == 130


@pytest.mark.parametrize("arguments", [[], ["keygen"], ["keygen", "a", "--admin"], ["nonsense"]])
def test_wrong_usage_is_status_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2


def test_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "sglang_ext.cli", "check-policy", str(EXAMPLE)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")

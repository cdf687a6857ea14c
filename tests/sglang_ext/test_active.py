"""One text for every process of a server, whatever happens to the file meanwhile."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from sglang_ext import active
from sglang_ext.errors import PolicyError
from sglang_ext.types import TenantId

_TEXT = "version: 1\ntenants: {acme: {}}\n"
_SHOW = "from sglang_ext import active; print(*sorted(active.policy().tenants))"


@pytest.fixture(autouse=True)
def nothing_in_force(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (active.POLICY_VARIABLE, active.DIGEST_VARIABLE):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(active, "_in_force", [])
    yield


def _other_process(**environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", _SHOW], env=env, capture_output=True, text=True)


def test_another_process_reads_what_was_handed_over() -> None:
    assert TenantId("acme") in active.hand_over(_TEXT).tenants
    answer = _other_process()
    assert answer.stdout == "acme system\n", answer.stderr


def test_what_was_handed_over_cannot_be_changed() -> None:
    active.hand_over(_TEXT)
    with pytest.raises(PermissionError), open(os.environ[active.POLICY_VARIABLE], "r+b") as file:
        file.write(b"version: 1\n")
        file.flush()


def test_a_large_policy_is_handed_over_whole() -> None:
    names = [f"tenant-{number}" for number in range(20_000)]
    active.hand_over("version: 1\ntenants:\n" + "".join(f"  {name}: {{}}\n" for name in names))
    with open(os.environ[active.POLICY_VARIABLE], "rb") as file:
        assert file.read().endswith(b"tenant-19999: {}\n")


def test_another_text_is_refused() -> None:
    active.hand_over(_TEXT)
    answer = _other_process(**{active.DIGEST_VARIABLE: "0" * 64})
    assert "not what the launcher handed over" in answer.stderr


def test_what_is_gone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(active.POLICY_VARIABLE, "/proc/0/fd/0")
    with pytest.raises(PolicyError, match="cannot be taken over"):
        active.policy()


def test_a_wrong_text_changes_nothing() -> None:
    active.hand_over(_TEXT)
    place = os.environ[active.POLICY_VARIABLE]
    with pytest.raises(PolicyError):
        active.hand_over("version: 2")
    assert os.environ[active.POLICY_VARIABLE] == place
    assert TenantId("acme") in active.policy().tenants

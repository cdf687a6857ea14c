"""The example of SGLang's frontend language, run as two tenants."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving.server import Client, ServerProcess

pytestmark = pytest.mark.serving

_EXAMPLE = Path(__file__).parents[2] / "examples" / "frontend.py"


def _run(url: str, key: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(_EXAMPLE), "--url", url, "--api-key", key]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_two_tenants_run_the_program_and_get_the_same_answers(
    server: ServerProcess, admin: Client
) -> None:
    first, second = (_run(server.url, f"key-{tenant}") for tenant in "de")
    assert first.returncode == 0, first.stderr
    assert "Paris" in first.stdout
    assert second.returncode == 0, second.stderr
    # The branches run in any order and batch, so only what the model is sure of is equal.
    assert [line for line in second.stdout.splitlines() if "Paris" in line] == [
        line for line in first.stdout.splitlines() if "Paris" in line
    ]
    hits = [line for line in admin.get("/metrics").text.splitlines() if 'source="hbm"' in line]
    assert any('tenant="d"' in line for line in hits), "the conversation reused none of its pages"


def test_a_program_without_a_key_is_refused(server: ServerProcess) -> None:
    refused = _run(server.url, "no-such-key")
    assert refused.returncode != 0
    assert "401" in refused.stderr or "not known" in refused.stderr

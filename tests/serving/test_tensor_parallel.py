"""Two ranks over gloo: the same isolation, and one truth in the metrics."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.conftest import run_server
from tests.serving.prompts import unique_prompt
from tests.serving.server import Client, ServerProcess, policy_file
from tests.tiny_models import tiny_llama

pytestmark = pytest.mark.serving


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with ``--tp 2`` and a model whose heads divide by two."""
    folder: Path = tmp_path_factory.mktemp("tp")
    model = tiny_llama(folder / "model")
    policy = policy_file(folder, ["a", "b"])
    yield from run_server(policy, "--model-path", str(model), "--tp", "2")


def test_tenants_are_apart_on_two_ranks(two_ranks: ServerProcess) -> None:
    a, b = (Client(two_ranks.url, f"key-{name}") for name in "ab")
    text = unique_prompt("two ranks", words=100)
    assert a.cached(text) == 0
    assert b.cached(text) == 0
    assert a.cached(text) == b.cached(text) > 0


def test_both_ranks_count_once(two_ranks: ServerProcess) -> None:
    a, admin = (Client(two_ranks.url, f"key-{name}") for name in ("a", "admin"))
    before = _prompt_tokens(admin)
    meta = a.generate(unique_prompt("count once"))["meta_info"]
    assert isinstance(meta, dict)
    assert _prompt_tokens(admin) - before == meta["prompt_tokens"]


def _prompt_tokens(admin: Client) -> float:
    lines = admin.get("/metrics").text.splitlines()
    prefix = "sglang_ext_prompt_tokens_total{"
    mine = [line for line in lines if line.startswith(prefix) and 'tenant="a"' in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in mine)


def test_a_change_of_policy_holds_on_both_ranks_from_one_step_on(two_ranks: ServerProcess) -> None:
    """A rank that refused what the other admits would wait for it for ever."""
    a, b, admin = (Client(two_ranks.url, f"key-{name}") for name in ("a", "b", "admin"))
    text = unique_prompt("above a hard quota", words=400)
    body = {"text": text, "sampling_params": {"max_new_tokens": 4}}
    assert a.post("/generate", body).status_code == 200
    for _ in range(3):
        tight = {"quota": {"hbm": "128tok", "hard": True}}
        assert admin.put("/ext/v1/tenants/a", tight).status_code == 200
        refused = a.post("/generate", body)
        assert refused.status_code == 400
        assert "hard quota" in refused.text
        assert b.generate(unique_prompt("another tenant"))
        assert admin.put("/ext/v1/tenants/a", {}).status_code == 200
        assert a.post("/generate", body).status_code == 200
    usage = admin.get("/ext/v1/usage").json()["tenants"]["a"]["tiers"]["hbm"]
    assert usage["held_tokens"] > 128
    assert not usage["hard"]

"""Trial 23 on the real server: one tenant floods, the other keeps what it has cached."""

from collections.abc import Iterator

import pytest

from tests.serving.conftest import run_server
from tests.serving.server import Client, ServerProcess, policy_file

pytestmark = pytest.mark.serving

LIMITS = "defaults: {quota: {hbm: 30%, hard: true}}\n"
WORDS = 1200


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server on which a tenant holds at most 6,000 of 20,000 tokens."""
    policy = policy_file(tmp_path_factory.mktemp("policy"), ["a", "b"])
    policy.write_text(LIMITS + policy.read_text())
    yield from run_server(policy, "--page-size", "16")


def prompt(number: int, words: int = WORDS) -> str:
    return " ".join(f"{number}-{word}" for word in range(words // 4))


@pytest.mark.trial(23)
def test_trial_23_a_flood_takes_nothing_from_the_quiet_tenant(limited: ServerProcess) -> None:
    flood, quiet = Client(limited.url, "key-a"), Client(limited.url, "key-b")
    quiet.generate(prompt(0))
    warm = quiet.cached(prompt(0))
    assert warm > 500
    for number in range(1, 31):
        flood.generate(prompt(number))
    assert flood.cached(prompt(1)) < 32, "the flood was too small to mean anything"
    assert quiet.cached(prompt(0)) >= 0.95 * warm


def test_a_request_above_a_hard_quota_is_refused_with_the_numbers(limited: ServerProcess) -> None:
    flood = Client(limited.url, "key-a")
    body = {"input_ids": list(range(5, 6505)), "sampling_params": {"max_new_tokens": 1}}
    response = flood.post("/generate", body)
    assert response.status_code == 400
    assert "6000 (its hard quota)" in response.text
    assert flood.generate("still serving")

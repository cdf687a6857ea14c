"""SGLang's switch for a cold control: every prompt is computed, and the cache stays sound."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.conftest import SMALL_POOL
from tests.serving.prompts import unique_prompt
from tests.serving.server import Client, ServerProcess, policy_file, running

pytestmark = pytest.mark.serving


@pytest.fixture
def cold(tmp_path: Path) -> Iterator[ServerProcess]:
    flags = ["--tenant-policy", str(policy_file(tmp_path, ["a"])), *SMALL_POOL]
    with running(flags, {"SGLANG_RADIX_FORCE_MISS": "1"}) as server:
        yield server


@pytest.mark.trial(99)
def test_trial_99_a_forced_miss_is_a_cold_control(cold: ServerProcess) -> None:
    a, text = Client(cold.url, "key-a"), unique_prompt("trial 99", words=80)
    answers = [a.generate(text, tokens=8) for _ in range(3)]
    assert [a.cached(text) for _ in range(2)] == [0, 0]
    assert len({str(answer["text"]) for answer in answers}) == 1

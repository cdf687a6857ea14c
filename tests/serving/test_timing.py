"""Trial 1: what A has cached does not show in B's time to first token."""

import random

import pytest

from sglang_ext.audit.statistics import auc_interval
from tests.serving.prompts import unique_prompt
from tests.serving.server import Client, ServerProcess

pytestmark = pytest.mark.serving

_PAIRS = {"": 40, "s": 16}
# A test runs on every change: 999 in 1,000 honest runs must pass.
_LEVEL = 0.999


def _ttft(client: Client, text: str) -> float:
    meta = client.generate(text)["meta_info"]
    assert isinstance(meta, dict)
    return float(meta["e2e_latency"])


@pytest.mark.trial(1)
def test_trial_1_bs_time_to_first_token_does_not_show_as_cache(
    server: ServerProcess, level: str
) -> None:
    a, b = (Client(server.url, f"key-{level}{name}") for name in "ab")
    order = random.Random(1)
    warm: list[float] = []
    cold: list[float] = []
    own_hits: list[float] = []
    for number in range(_PAIRS[level]):
        known, fresh = (
            unique_prompt(f"timing {level} {kind} {number}", 400) for kind in ("known", "fresh")
        )
        a.generate(known)
        probes = [(known, warm), (fresh, cold)]
        order.shuffle(probes)
        for text, times in probes:
            times.append(_ttft(b, text))
        own_hits.append(_ttft(a, known))
    seen_by_b = auc_interval(cold, warm, _LEVEL)
    seen_by_a = auc_interval(cold, own_hits, _LEVEL)
    assert seen_by_b.low <= 0.5 <= seen_by_b.high, seen_by_b
    assert seen_by_a.low > 0.5, f"the test cannot see a hit: {seen_by_a}"

"""Trials 85 and 86: clients that leave, and answers from the cache, change no greedy answer."""

import random

import pytest

from tests.serving.prompts import unique_prompt
from tests.serving.server import Client

pytestmark = pytest.mark.serving

_RUNS = 50
# Two steps of bfloat16 between 16 and 32, where the logits of likely tokens lie: which kernel a
# matrix takes depends on its rows and on the processor. A wrong page moves them by several units.
_LOGPROB = 0.25


@pytest.mark.trial(86)
def test_trial_86_random_cancellations_leave_the_greedy_answer_alone(a: Client) -> None:
    draw = random.Random(86)
    text = unique_prompt("trial 86", words=80)
    a.generate(text, tokens=12)
    expected = a.generate(text, tokens=12)["text"]
    sampling = {"max_new_tokens": 200, "ignore_eos": True, "temperature": 0}
    for number in range(_RUNS):
        # A prefix of the same text, so that every cancelled request meets the nodes of the answer.
        prefix = text[: draw.randrange(40, len(text))] + f" {number}"
        events = a.events(
            "/generate", {"text": prefix, "stream": True, "sampling_params": sampling}
        )
        for _ in range(draw.randrange(1, 4)):
            next(events)
        events.close()
        if number % 5 == 0:
            assert a.generate(text, tokens=12)["text"] == expected


@pytest.mark.trial(85)
def test_trial_85_a_hit_is_as_sure_as_a_computed_answer(a: Client) -> None:
    """Cold and warm differ by rounding: the shapes of the matrices do. How much is printed."""
    flips, worst = 0, 0.0
    for number in range(18):
        text = unique_prompt(f"trial 85 {number}", words=70)
        (cold, _), (warm, cached) = (_first_token(a, text) for _ in range(2))
        assert cached > 0
        flips += cold[1] != warm[1]
        worst = max(worst, abs(cold[0] - warm[0]))
    print(
        f"trial 85: {flips} of 18 first tokens differ cold and warm, logprob by up to {worst:.3g}"
    )
    assert worst <= _LOGPROB


def _first_token(client: Client, text: str) -> tuple[list[float], int]:
    """Return [logprob, token, text] of the first token, and how many tokens were cached."""
    meta = client.generate(text, return_logprob=True)["meta_info"]
    assert isinstance(meta, dict)
    return meta["output_token_logprobs"][0], int(meta["cached_tokens"])

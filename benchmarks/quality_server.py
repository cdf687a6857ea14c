"""What a running server thinks of given text: log-likelihoods, needles and second turns."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from engines import Engine

__all__ = ["Seen", "find_needles", "read", "second_turns"]

_BATCH = 8
_NEEDLE_TOKENS = 2_000
_TIMEOUT_S = 600


@dataclass(frozen=True)
class Seen:
    """What a server made of a run of tokens, one entry a token.

    ``loss``: negative log-likelihood, nats; ``best``: the most likely token; ``cached``: how many
    tokens before the run were cached.
    """

    loss: list[float]
    best: list[int]
    cached: int


def read(
    server: Engine, texts: Sequence[Sequence[int]], starts: Sequence[int] | None = None
) -> list[Seen]:
    """Return what the server makes of the tokens of each text, from ``starts`` (default 1) on."""
    starts = starts or [1] * len(texts)
    found = []
    with httpx.Client(headers=dict(server.headers), timeout=_TIMEOUT_S) as client:
        for first in range(0, len(texts), _BATCH):
            batch = slice(first, first + _BATCH)
            body = {
                "input_ids": [list(text) for text in texts[batch]],
                "sampling_params": {"max_new_tokens": 1, "temperature": 0},
                "return_logprob": True,
                "logprob_start_len": [start - 1 for start in starts[batch]],
                "top_logprobs_num": 1,
            }
            response = client.post(server.url + "/generate", json=body)
            response.raise_for_status()
            found += [_seen(answer["meta_info"]) for answer in response.json()]
    return found


def _seen(meta: dict[str, Any]) -> Seen:
    # The first position has no prediction.
    pairs = zip(meta["input_token_logprobs"][1:], meta["input_top_logprobs"][1:], strict=True)
    rows = [(-own[0], top[0][1]) for own, top in pairs]
    return Seen([loss for loss, _ in rows], [best for _, best in rows], meta["cached_tokens"])


def find_needles(server: Engine, tokenizer: Any, count: int) -> list[float]:
    """Return the loss, nats, of each of ``count`` numbers hidden in 2,000 tokens of filler."""
    texts, starts = [], []
    for number in range(count):
        before, number_tokens = _needle(tokenizer, number, count)
        texts.append(before + number_tokens)
        starts.append(len(before))
    return [sum(seen.loss) for seen in read(server, texts, starts)]


def _needle(tokenizer: Any, number: int, count: int) -> tuple[list[int], list[int]]:
    """The tokens up to the answer, and those of the answer; the needles lie at even depths."""
    draw = random.Random(number)
    words = ["river", "stone", "market", "window", "garden", "letter", "summer", "engine", "paper"]
    sentences = [
        f"The {draw.choice(words)} near the {draw.choice(words)} was {draw.choice(words)} again."
        for _ in range(_NEEDLE_TOKENS // 11)
    ]
    secret = "".join(draw.choices("0123456789", k=6))
    place = int((number + 0.5) / count * len(sentences))
    sentences.insert(place, f"The code of the safe is {secret}.")
    text = " ".join(sentences) + " Question: what is the code of the safe? The code of the safe is"
    return tokenizer(text)["input_ids"], tokenizer(" " + secret)["input_ids"]


def second_turns(server: Engine, texts: Sequence[Sequence[int]]) -> tuple[list[float], list[int]]:
    """Read the first half of each text, then the whole, whose first half should now be cached.

    Returns the mean loss of each second half, and how many tokens before it were cached.
    """
    halves = [len(text) // 2 for text in texts]
    read(server, [text[:half] for text, half in zip(texts, halves, strict=True)])
    found = read(server, texts, halves)
    return [sum(seen.loss) / len(seen.loss) for seen in found], [seen.cached for seen in found]

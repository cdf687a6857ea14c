"""One request to an OpenAI completions route, streamed, in token ids both ways.

Ids rather than text: so no engine loses a prefix to a text that is not tokenized back to the ids it
came from, and the accounts are exact. ``ignore_eos`` makes all engines do the same work.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

__all__ = ["MODEL", "Reply", "complete"]

MODEL = "demo"
"""The name under which every engine serves the model."""


@dataclass
class Reply:
    """What a request took, in seconds, and what it used, in tokens."""

    sent: float
    ttft: float = 0.0
    seconds: float = 0.0
    gaps: list[float] = field(default_factory=list)
    """Seconds between tokens after the first; tokens that came together share their gap."""
    output: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def take(self, event: Mapping[str, Any], now: float) -> None:
        """Take in one event of the stream that came at ``now``."""
        for choice in event.get("choices", ()):
            self._take_tokens(choice.get("token_ids") or [], now - self.sent)
        usage = event.get("usage")
        if usage:
            self.prompt_tokens = usage["prompt_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            self.cached_tokens = details.get("cached_tokens") or 0

    def _take_tokens(self, tokens: Sequence[int], after: float) -> None:
        if not tokens:
            return
        if self.output:
            self.gaps += [(after - self.seconds) / len(tokens)] * len(tokens)
        else:
            self.ttft = after
        self.seconds = after
        self.output += tokens


async def complete(
    client: httpx.AsyncClient,
    url: str,
    headers: Mapping[str, str],
    prompt: Sequence[int],
    answer: int,
) -> Reply:
    """Ask for ``answer`` greedy tokens after ``prompt``. Raises httpx.HTTPError when refused."""
    body = {
        "model": MODEL,
        "prompt": list(prompt),
        "max_tokens": answer,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    reply = Reply(time.perf_counter())
    async with client.stream(
        "POST", url + "/v1/completions", json=body, headers=headers
    ) as answer_:
        answer_.raise_for_status()
        async for line in answer_.aiter_lines():
            if line.startswith("data: {"):
                reply.take(json.loads(line[6:]), time.perf_counter())
    return reply

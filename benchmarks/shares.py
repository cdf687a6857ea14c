"""Two backlogged tenants on one engine: who got how much while both had something to wait for."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence

import httpx
from neighbours import as_tenant, text

from engines import Engine
from report import Report

__all__ = ["SHARING", "add_weight", "measure_shares"]

SHARING = ("long", "short", "light", "heavy", "busy")
"""Tenants that the policy of the engine has to know; ``add_weight`` makes one of them heavy."""

_LONG, _SHORT = 600, 60
_BUSY_WORDS = 1200

Ends = list[tuple[str, int]]


def add_weight(policy: str) -> str:
    """Return the text of a policy in which ``heavy`` has three times the weight of the others."""
    return policy.replace("heavy: {", "heavy: {weight: 3, ")


def measure_shares(report: Report, server: Engine, requests: int) -> None:
    """Add two bars: equal weights, prompts 10 times as long (``requests`` of them); weights 1:3."""
    draw = random.Random(1)
    equal = {
        "long": [text(draw, _LONG) for _ in range(requests)],
        "short": [text(draw, _SHORT) for _ in range(10 * requests)],
    }
    weighted = {
        "heavy": [text(draw, 2 * _SHORT) for _ in range(6 * requests)],
        "light": [text(draw, 2 * _SHORT) for _ in range(2 * requests)],
    }
    lengths = "served tokens, prompts ten times as long over short ones"
    _bars(report, lengths, _ratio(report, server, equal, draw), 0.8, 1.25)
    weights = "served tokens, weight 3 over weight 1"
    _bars(report, weights, _ratio(report, server, weighted, draw), 3 * 0.85, 3 * 1.15)


def _bars(report: Report, name: str, value: float, least: float, most: float) -> None:
    report.at_least(name, value, least)
    report.at_most(name, value, most)


def _ratio(
    report: Report, server: Engine, texts: Mapping[str, Sequence[str]], draw: random.Random
) -> float:
    """Return what the first tenant got over what the second got."""
    # Another tenant keeps the engine busy meanwhile, so that nearly all of them wait.
    ends = asyncio.run(_all(server, {"busy": [text(draw, _BUSY_WORDS)], **texts}))
    served = _served_while_both_wait([entry for entry in ends if entry[0] != "busy"])
    report.runs.append({"served tokens while both wait": dict(served)})
    first, second = texts
    return served[first] / served[second]


def _served_while_both_wait(ends: Ends) -> Counter[str]:
    left = Counter(tenant for tenant, _ in ends)
    served: Counter[str] = Counter()
    for tenant, tokens in ends:
        left[tenant] -= 1
        if not left[tenant]:
            break
        served[tenant] += tokens
    return served


async def _all(server: Engine, texts: Mapping[str, Sequence[str]]) -> Ends:
    """Send the texts of all tenants at once; return (tenant, tokens) in the order of the ends."""
    ends: Ends = []
    sent = (_send(as_tenant(server, name), name, own, ends) for name, own in texts.items())
    await asyncio.gather(*sent)
    return ends


async def _send(server: Engine, tenant: str, texts: Sequence[str], ends: Ends) -> None:
    body = {"text": texts, "stream": True, "sampling_params": {"max_new_tokens": 1}}
    async with (
        httpx.AsyncClient(timeout=600) as client,
        client.stream("POST", server.url + "/generate", json=body, headers=server.headers) as r,
    ):
        r.raise_for_status()
        lines = (line async for line in r.aiter_lines() if line.startswith("data: {"))
        async for line in lines:
            ends.append((tenant, json.loads(line[6:])["meta_info"]["prompt_tokens"]))

"""Two backlogged tenants on one engine: who got how much while both had something to wait for."""

import asyncio
import json
import random
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
from neighbours import as_tenant, text

from engines import Engine, demo_flags, engine, write_policy
from report import Report

__all__ = ["measure_shares"]

_PORT = 35103
_POOL_TOKENS = 20_000
_LONG, _SHORT = 600, 60
_BUSY_WORDS = 1200

Ends = list[tuple[str, int]]


def measure_shares(report: Report, requests: int, step: int) -> None:
    """Add two bars: equal weights, prompts 10 times as long (``requests`` of them); weights 1:3."""
    draw = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        policy = write_policy(Path(folder), ["long", "short", "light", "heavy", "busy"])
        heavy = policy.read_text("utf-8").replace("heavy: {", "heavy: {weight: 3, ")
        policy.write_text(heavy, encoding="utf-8")
        flags = [*demo_flags(_POOL_TOKENS), "--chunked-prefill-size", str(step)]
        command = ["--tenant-policy", str(policy), *flags]
        with engine("ours", "sglang_ext.launch_server", _PORT, command, "key-busy") as server:
            equal = {
                "long": [text(draw, _LONG) for _ in range(requests)],
                "short": [text(draw, _SHORT) for _ in range(10 * requests)],
            }
            weighted = {
                "light": [text(draw, 2 * _SHORT) for _ in range(2 * requests)],
                "heavy": [text(draw, 2 * _SHORT) for _ in range(6 * requests)],
            }
            lengths = _ratio(report, server, equal, draw)
            weights = _ratio(report, server, weighted, draw)
    report.at_least("served tokens, ten times longer prompts over short ones", lengths, 0.8)
    report.at_most("served tokens, ten times longer prompts over short ones", lengths, 1.25)
    report.at_least("served tokens, weight 3 over weight 1", 1 / weights, 3 * 0.85)
    report.at_most("served tokens, weight 3 over weight 1", 1 / weights, 3 * 1.15)


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

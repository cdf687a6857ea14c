"""Two ranks with tiers under random load: SGLang's own check finds every decision equal.

An hour of it: ``SGLANG_EXT_CONSENSUS_SECONDS=3600 pytest tests/serving/test_rank_consensus.py``.
"""

import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from sglang_ext.tenancy.keys import digest
from tests.serving.prompts import unique_prompt
from tests.serving.server import Client, ServerProcess, running
from tests.tiny_models import tiny_llama

pytestmark = pytest.mark.serving

SECONDS = float(os.environ.get("SGLANG_EXT_CONSENSUS_SECONDS", "20"))
MORE_SECONDS = 120
SOURCES = ("device", "host", "storage")
CLIENTS = 6
STORIES = 40
PROBE_SECONDS = 5
# What a rank logs that disagrees, or that lost the others.
_DIVERGED = re.compile(r"diverge|Traceback|Scheduler hit an exception", re.IGNORECASE)
_CHECKED = "Rank consensus checker is enabled"
POLICY = """
version: 1
admin_keys: ["{admin}"]
tiers: {{hbm: {{watermark: 10%}}, cpu: {{size: 16MB}}, nvme: {{size: 512MB, path: {pages}}}}}
defaults: {{quota: {{hbm: 100%, cpu: 100%}}, ttl: {{hbm: 1s, cpu: 3s, nvme: 20s, mode: strict}}}}
tenants:
  a: {{api_keys: ["{a}"], sla: premium, reserve: {{hbm: 10%}}}}
  b: {{api_keys: ["{b}"], ttl: {{hbm: 2s, cpu: 1m, nvme: 1h}}}}
  c: {{api_keys: ["{c}"], sla: basic, max_queued: 2, quota: {{hbm: 30%, cpu: 30%, hard: true}}}}
"""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder: Path = tmp_path_factory.mktemp("consensus")
    keys = {name: digest(f"key-{name}") for name in ("a", "b", "c", "admin")}
    policy = folder / "tenants.yaml"
    policy.write_text(POLICY.format(pages=folder / "pages", **keys), encoding="utf-8")
    # Large enough that loading from the disk is quicker than computing.
    model = tiny_llama(folder / "model", heads=8, kv_heads=4, layers=8, hidden=512, head_dim=64)
    flags = ["--model-path", str(model), "--tp", "2", "--max-total-tokens", "4000"]
    arguments = ["--tenant-policy", str(policy), *flags, "--mem-fraction-static", "0.3"]
    with running(arguments, {"SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}) as server:
        yield server


def is_over(end: float, seen: Counter[str]) -> bool:
    """Tell whether the time has come; a slow machine gets more until every tier has given."""
    now = time.monotonic()
    return now >= end and (now >= end + MORE_SECONDS or all(seen[tier] for tier in SOURCES))


def live(server: ServerProcess, end: float, seen: Counter[str], seed: int) -> None:
    """Send random stories of all tenants until the end; leave some before they are answered."""
    draw = random.Random(seed)
    while not is_over(end, seen):
        name = draw.choice("abc")
        number = draw.randrange(STORIES)
        text = unique_prompt(f"story {number}", words=draw.choice((60, 150, 400)))
        client = Client(server.url, f"key-{name}")
        if draw.random() < 0.1:
            leave(client, text)
            seen["left"] += 1
            continue
        sampling = {"temperature": 0, "max_new_tokens": draw.choice((1, 8))}
        answer = client.post("/generate", {"text": text, "sampling_params": sampling})
        seen[str(answer.status_code)] += 1
        if answer.status_code == 200:
            where: Any = answer.json()["meta_info"]["cached_tokens_details"] or {}
            for source in SOURCES:
                seen[source] += bool(where.get(source))


def leave(client: Client, text: str) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 200}
    body = {"text": text, "stream": True, "sampling_params": sampling}
    headers = {"authorization": f"Bearer {client.key}"}
    with httpx.stream("POST", f"{client.url}/generate", json=body, headers=headers, timeout=180):
        return


def probe(server: ServerProcess, over: threading.Event, seen: Counter[str]) -> None:
    while not over.wait(PROBE_SECONDS):
        seen[str(httpx.get(server.url + "/health", timeout=60).status_code)] += 1


@pytest.mark.trial(51)
def test_both_ranks_take_the_same_decisions(two_ranks: ServerProcess) -> None:
    seen: Counter[str] = Counter()
    alive: Counter[str] = Counter()
    over = threading.Event()
    end = time.monotonic() + SECONDS
    with ThreadPoolExecutor(CLIENTS + 1) as pool:
        probing = pool.submit(probe, two_ranks, over, alive)
        work = [pool.submit(live, two_ranks, end, seen, seed) for seed in range(CLIENTS)]
        try:
            for job in work:
                job.result()
        finally:
            over.set()
        probing.result()
    assert set(alive) == {"200"}, alive
    lines = [line for line in two_ranks.lines if _CHECKED not in line]
    assert len(lines) < len(two_ranks.lines), "nothing was checked"
    assert not [line for line in lines if _DIVERGED.search(line)], two_ranks.tail()
    assert seen["200"] > 0
    assert min(seen[source] for source in SOURCES) > 0, seen
    assert {code for code in seen if code.isdigit()} <= {"200", "429", "503"}, seen

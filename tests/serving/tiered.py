"""A small server with HBM, CPU and NVMe, stories to tell it, and where their tokens came from."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_ext.tenancy.keys import digest
from tests.serving.server import Client, ServerProcess

FLAGS = ("--max-total-tokens", "2000", "--mem-fraction-static", "0.3", "--sleep-on-idle")
NVME_BYTES = 400_000_000
WORDS = ("apple", "river", "stone", "cloud", "tiger", "lamp", "ocean", "forest", "paper", "music")
DEADLINE_S = 60
ROUNDING = 0.25
"""Two steps of bfloat16 between 16 and 32, where the logits of likely tokens lie; see `apart`."""
LEAST = 400
"""Tokens of a story that surely fill whole pages."""


class Tiers:
    """A server that a test may restart on the folder that it had."""

    def __init__(self, folder: Path) -> None:
        self.pages = folder / "pages"
        self.policy = folder / "tenants.yaml"
        self.master_key = folder / "master.key"
        self.master_key.write_text("5e" * 32)
        self.master_key.chmod(0o600)
        names = ("a", "b", "c", "short", "fixed", "sealed", "sealed2", "admin")
        keys = {name: digest(f"key-{name}") for name in names}
        self.policy.write_text(
            "version: 1\n"
            f'admin_keys: ["{keys["admin"]}"]\n'
            # Where it is slow to load or quick to compute, these tests still want to see it loaded.
            f"tiers: {{load: always, cpu: {{size: 120MB}}, nvme: {{size: {NVME_BYTES}B, "
            f"path: {self.pages}, master_key: {self.master_key}}}}}\n"
            "defaults: {quota: {hbm: 100%, cpu: 100%}}\n"
            "tenants:\n"
            f'  a: {{api_keys: ["{keys["a"]}"]}}\n'
            f'  b: {{api_keys: ["{keys["b"]}"]}}\n'
            f'  c: {{api_keys: ["{keys["c"]}"]}}\n'
            f'  sealed: {{api_keys: ["{keys["sealed"]}"], isolation: sealed}}\n'
            f'  sealed2: {{api_keys: ["{keys["sealed2"]}"], isolation: sealed, ttl: {{hbm: 1s, '
            "cpu: 2s, nvme: 3s, mode: strict}}\n"
            f'  fixed: {{api_keys: ["{keys["fixed"]}"], ttl: {{hbm: 1s, cpu: 2s, nvme: 4s, '
            "since: created}}\n"
            f'  short: {{api_keys: ["{keys["short"]}"], ttl: {{hbm: 1s, cpu: 2s, nvme: 3s, '
            "mode: strict}}\n",
            encoding="utf-8",
        )
        self.start()

    def start(self) -> None:
        arguments = ["--tenant-policy", str(self.policy), *FLAGS]
        self.server = ServerProcess("sglang_ext.launch_server", arguments)
        self.server.wait_ready()

    def restart(self) -> None:
        self.server.stop()
        self.start()

    def client(self, tenant: str) -> Client:
        return Client(self.server.url, f"key-{tenant}")

    def held(self, tenant: str) -> dict[str, int]:
        """Return the tokens of a tenant by tier, as the tree has them."""
        answer = self.client("admin").get(
            "/ext/v1/tree",
        )
        owner = f"{'s' if tenant.startswith('sealed') else 't'}:{tenant}"
        runs = [run for run in answer.json()["ranks"][0]["runs"] if run["owner"] == owner]
        return {
            tier: sum(run["tokens"] for run in runs if tier in run["tiers"])
            for tier in ("hbm", "cpu")
        }


def wait(until: Callable[[], bool]) -> None:
    """Return once ``until`` holds; fail after a minute."""
    end = time.monotonic() + DEADLINE_S
    while not until():
        assert time.monotonic() < end, "it never happened"


def story(number: int, words: int = 450) -> str:
    """Return a text of about 480 tokens with a fact that only it has."""
    drawn = random.Random(number)
    text = " ".join(drawn.choice(WORDS) for _ in range(words))
    return f"Story {number}. The secret number is {drawn.randrange(10**6)}. {text}"


@dataclass(frozen=True)
class Told:
    """A greedy answer, the log probability of its first token, where cached tokens came from."""

    text: object
    logprob: float
    sources: dict[str, int]

    @property
    def cached(self) -> int:
        return sum(self.sources.values())


def apart(first: Sequence[Told], second: Sequence[Told]) -> float:
    """Return by how much the log probabilities of two runs differ at most.

    A prompt that is computed in other pieces rounds otherwise, and so may another start, which
    chooses anew how to multiply.
    """
    return max(abs(one.logprob - two.logprob) for one, two in zip(first, second, strict=True))


def equal(first: Sequence[Told], second: Sequence[Told]) -> bool:
    """Tell whether two runs of one process agree to the letter where they computed as much."""
    return all(
        one.text == two.text
        for one, two in zip(first, second, strict=True)
        if one.cached == two.cached
    )


def ask(client: Client, number: int) -> Told:
    answer = client.generate(story(number), tokens=12, return_logprob=True)
    meta: Any = answer["meta_info"]
    where = meta["cached_tokens_details"] or {}
    sources = {tier: where.get(tier, 0) for tier in ("device", "host", "storage")}
    return Told(answer["text"], meta["output_token_logprobs"][0][0], sources)


def flush(admin: Client, tenant: str) -> dict[str, dict[str, int]]:
    """Flush a tenant and return what that did."""
    answer = admin.post("/ext/v1/flush", {"tenant": tenant})
    assert answer.status_code == 200, answer.text
    (rank,) = answer.json()["ranks"]
    assert isinstance(rank, dict)
    return rank


def flood(client: Client, first: int, count: int) -> None:
    for number in range(first, first + count):
        client.generate(story(number))

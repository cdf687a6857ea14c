"""Two data-parallel ranks: conversations stay, memory fills evenly, everything is counted once."""

import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.conftest import run_server
from tests.serving.prompts import unique_prompt
from tests.serving.replicas import told
from tests.serving.server import Client, ServerProcess, policy_file
from tests.serving.tiered import wait
from tests.tiny_models import tiny_llama

pytestmark = pytest.mark.serving

RANKS = 2


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder: Path = tmp_path_factory.mktemp("dp")
    policy = policy_file(folder, ["a", "b", "c"], "defaults: {quota: {hbm: 100%}}")
    yield from run_server(policy, "--model-path", str(tiny_llama(folder / "model")), "--dp", "2")


def client(server: ServerProcess, name: str) -> Client:
    return Client(server.url, f"key-{name}")


def held(server: ServerProcess, owner: str) -> list[int]:
    """Return the tokens of an owner in the tree of each rank."""
    ranks = client(server, "admin").get("/ext/v1/tree?limit=10000").json()["ranks"]
    return [sum(run["tokens"] for run in rank["runs"] if run["owner"] == owner) for rank in ranks]


def test_a_conversation_stays_on_its_rank_and_other_tenants_are_apart(
    two_ranks: ServerProcess,
) -> None:
    a, b = client(two_ranks, "a"), client(two_ranks, "b")
    for number in range(6):
        text = unique_prompt(f"talk {number}", words=100)
        assert told(a, text, f"talk-{number}") == 0
        cached = [told(a, text + " And then?" * turn, f"talk-{number}") for turn in range(1, 4)]
        assert min(cached) >= 96, cached
        assert told(b, text) == 0
        assert told(b, text) >= 96, "without a conversation its beginning leads it there"


def test_memory_fills_evenly(two_ranks: ServerProcess) -> None:
    """Conversations that begin with 60 to 300 words, two turns."""
    c, drawn = client(two_ranks, "c"), random.Random(7)
    for number in range(96):
        text = unique_prompt(f"even {number}", words=drawn.choice((60, 120, 200, 300)))
        assert told(c, text, f"even-{number}") == 0
        assert told(c, text + " And then, what did they say?", f"even-{number}") > 0
    ranks = held(two_ranks, "t:c")
    print(f"tokens a rank: {ranks}")
    assert len(ranks) == RANKS
    assert max(ranks) / (sum(ranks) / RANKS) < 1.05


def test_the_ledgers_of_all_ranks_are_summed_once(two_ranks: ServerProcess) -> None:
    admin = client(two_ranks, "admin")
    for name in "ab":
        told(client(two_ranks, name), unique_prompt(f"count {name}", words=200))

    def figures() -> tuple[Counter[str], Counter[str], Counter[str]]:
        usage: Counter[str] = Counter()
        for name, row in admin.get("/ext/v1/usage").json()["tenants"].items():
            usage[f"t:{name}"] += row["tiers"]["hbm"]["held_tokens"]
        series = r'sglang_ext_held_tokens\{.*owner="([^"]+)".*tier="hbm".*\} (\S+)'
        metrics: Counter[str] = Counter()
        for owner, tokens in re.findall(series, admin.get("/metrics").text):
            metrics[owner] += int(float(tokens))
        trees = Counter({owner: sum(held(two_ranks, owner)) for owner in ("t:a", "t:b", "t:c")})
        return usage, metrics, trees

    def agree() -> bool:
        """What the metrics say is as old as the last step."""
        usage, metrics, trees = figures()
        return all(usage[owner] == metrics[owner] == trees[owner] > 0 for owner in trees)

    wait(agree)

"""Conversations that wander over three servers: what is computed again, with a shared store or not.

    python benchmarks/bench_cluster.py [--quick] [--json FILE]

Three servers of the demo model, each with HBM, CPU and a disk of its own, and ``tiers.remote`` on a
Mooncake store. Turn n of every conversation goes to server n mod 3, as a balancer without affinity
does it. Then the store's processes are ended, and as many new conversations go the same way: now
every server has only what it computed itself. *Recomputed* are tokens of whole pages of the turn
before, which some server had computed, that the one which was asked computed again; the share is of
all such tokens. Requests are sent one after the other, so that the seconds say something.
"""

import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from engines import Engine, ask, demo_flags, engine
from mooncake_store import mooncake_store
from report import Report, arguments
from sglang_ext.gateway.machine import free_ports
from sglang_ext.tenancy.keys import digest
from sglang_ext.tiering.remote_mooncake import MooncakeAddress, check_installed

SERVERS = 3
CONVERSATIONS = 4
HBM_TOKENS, CPU_BYTES, NVME_BYTES, LENT_BYTES = 6000, 200_000_000, 500_000_000, 600_000_000
PAGE = 16
WORDS_A_TURN, TOKENS_AN_ANSWER = 110, 16
BOUND = 1 / 3
WORDS = ("river", "stone", "lamp", "garden", "north", "winter", "paper", "cloud", "bridge", "song")
VARIABLES = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}

Run = dict[str, Any]


def main() -> int:
    options = arguments("bench_cluster", __doc__ or "").parse_args()
    check_installed()
    report = Report("Conversations over three servers")
    turns = 4 if options.quick else 7
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as store:
        address = store.enter_context(mooncake_store(LENT_BYTES))
        with servers(Path(folder), address) as nodes:
            with_store = add(report, "shared store", talk(nodes, turns, draw))
            store.close()
            alone = add(report, "each alone", talk(nodes, turns, draw))
    report.at_most("recomputed share, shared store over each alone", with_store / alone, BOUND)
    return report.finish(options.json)


def add(report: Report, name: str, answers: list[Run]) -> float:
    """Keep the answers of one kind of cluster; return the share that was computed again."""
    later = [answer for answer in answers if answer["turn"]]
    known = sum(answer["known"] for answer in later)
    share = sum(answer["recomputed"] for answer in later) / known
    report.runs.append({"servers": name, "answers": answers})
    report.figures[f"tokens of whole pages that some server had computed, {name}"] = known
    report.figures[f"recomputed share of them, {name}"] = share
    report.figures[f"seconds to the first token of later turns, {name}"] = median(
        answer["ttft"] for answer in later
    )
    return share


@contextmanager
def servers(folder: Path, remote: MooncakeAddress) -> Iterator[list[Engine]]:
    """Run the servers; they start one after the other, since each takes a core to start."""
    with ExitStack() as stack:
        nodes = []
        for number, port in enumerate(free_ports(SERVERS)):
            policy = write_policy(folder / str(number), remote)
            flags = ["--tenant-policy", str(policy), *demo_flags(HBM_TOKENS)]
            node = engine(
                *(f"server {number}", "sglang_ext.launch_server", port, flags, "key-a"),
                variables=VARIABLES,
            )
            nodes.append(stack.enter_context(node))
        yield nodes


def write_policy(folder: Path, remote: MooncakeAddress) -> Path:
    """Write the policy of one server."""
    folder.mkdir()
    place = f'master: "{remote.master}", admin: "{remote.admin}"'
    lines = [
        "version: 1",
        "tiers:",
        "  load: always",
        f"  cpu: {{size: {CPU_BYTES}B}}",
        f"  nvme: {{size: {NVME_BYTES}B, path: {folder / 'pages'}}}",
        f"  remote: {{backend: mooncake, {place}, size: {int(0.85 * LENT_BYTES)}B}}",
        "defaults: {quota: {hbm: 100%, cpu: 100%, remote: 100%}}",
        f'tenants: {{a: {{api_keys: ["{digest("key-a")}"]}}}}',
    ]
    path = folder / "tenants.yaml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def talk(nodes: Sequence[Engine], turns: int, draw: random.Random) -> list[Run]:
    """Hold conversations turn by turn, each turn on the next server."""
    texts = [f"Conversation {draw.randrange(10**9)}." for _ in range(CONVERSATIONS)]
    computed = [0] * CONVERSATIONS
    answers: list[Run] = []
    with httpx.Client(timeout=300) as client:
        for turn in range(turns):
            for number in range(CONVERSATIONS):
                texts[number] += " User: " + " ".join(draw.choices(WORDS, k=WORDS_A_TURN))
                node = nodes[turn % SERVERS]
                answer = ask(client, node, texts[number], TOKENS_AN_ANSWER)
                texts[number] += f" Assistant: {answer.text}"
                known = computed[number] // PAGE * PAGE
                computed[number] = answer.prompt_tokens
                answers.append(
                    {
                        "turn": turn,
                        "server": node.name,
                        "known": known,
                        "recomputed": max(0, known - answer.cached_tokens),
                        "ttft": answer.ttft,
                        "sources": dict(answer.sources),
                    }
                )
    return answers


if __name__ == "__main__":
    sys.exit(main())

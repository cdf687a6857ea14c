"""Conversations that wander over three servers: what is computed again, with a shared store or not.

    python benchmarks/bench_cluster.py [--quick] [--json FILE]

Three servers of the demo model, each with HBM, CPU and a disk of its own, with and without
``tiers.remote`` on a Mooncake store. Clients send every turn of a conversation to the next server,
as a balancer without affinity does. *Recomputed* are tokens of whole pages of the turn before that
some server had computed and this one computed again; the share is of all such tokens.
"""

import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from engines import Engine, ask, demo_flags, engine
from mooncake_store import mooncake_store
from report import Report, arguments, spread
from sglang_ext.gateway.machine import free_ports
from sglang_ext.tenancy.keys import digest
from sglang_ext.tiering.remote_mooncake import MooncakeAddress, check_installed

SERVERS = 3
CONVERSATIONS = 7
"""Not a multiple of the servers, or each conversation would stay on one."""
HBM_TOKENS, CPU_BYTES, NVME_BYTES = 8_000, 300_000_000, 1_000_000_000
LENT_BYTES = 1_000_000_000
PAGE = 16
BOUND = 1 / 3
WORDS = ("river", "stone", "lamp", "garden", "north", "winter", "paper", "cloud", "bridge", "song")

Run = dict[str, Any]


def main() -> int:
    options = arguments("bench_cluster", __doc__ or "").parse_args()
    check_installed()
    report = Report("Conversations over three servers")
    turns = 4 if options.quick else 7
    shares = {}
    with tempfile.TemporaryDirectory() as folder, mooncake_store(LENT_BYTES) as address:
        for name, remote in (("alone", None), ("shared store", address)):
            with servers(Path(folder) / name, remote) as nodes:
                run = talk(nodes, turns, options.seed)
            report.runs.append({"servers": name, **run})
            shares[name] = run["recomputed"] / run["known"]
            report.figures[f"recomputed share, {name}"] = shares[name]
            report.figures[f"seconds to the first token of later turns, {name}"] = run["ttft"]
    ratio = shares["shared store"] / shares["alone"]
    report.at_most("recomputed share, shared store over alone", ratio, BOUND)
    return report.finish(options.json)


@contextmanager
def servers(folder: Path, remote: MooncakeAddress | None) -> Iterator[list[Engine]]:
    """Run the servers, one after the other up to its start."""
    ports, common = free_ports(SERVERS), demo_flags(HBM_TOKENS)
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                engine(
                    f"node {number}",
                    "sglang_ext.launch_server",
                    port,
                    ["--tenant-policy", str(policy(folder / str(number), remote)), *common],
                    "key-a",
                )
            )
            for number, port in enumerate(ports)
        ]


def policy(folder: Path, remote: MooncakeAddress | None) -> Path:
    """Write the policy of one server."""
    folder.mkdir(parents=True)
    lines = [
        "version: 1",
        "tiers:",
        "  load: always",
        f"  cpu: {{size: {CPU_BYTES}B}}",
        f"  nvme: {{size: {NVME_BYTES}B, path: {folder / 'pages'}}}",
    ]
    if remote is not None:
        place = f'master: "{remote.master}", admin: "{remote.admin}"'
        lines.append(f"  remote: {{backend: mooncake, {place}, size: {int(0.85 * LENT_BYTES)}B}}")
    lines += [f'tenants: {{a: {{api_keys: ["{digest("key-a")}"]}}}}']
    path = folder / "tenants.yaml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def talk(nodes: list[Engine], turns: int, seed: int) -> Run:
    """Hold all conversations, turn by turn, each turn on the next server."""
    draw = random.Random(seed)
    texts = [f"Conversation {number}." for number in range(CONVERSATIONS)]
    computed = [0] * CONVERSATIONS
    found: list[dict[str, Any]] = []
    sent = 0
    with httpx.Client(timeout=300) as client:
        for turn in range(turns):
            for number in range(CONVERSATIONS):
                texts[number] += " User: " + " ".join(draw.choice(WORDS) for _ in range(110))
                answer = ask(client, nodes[sent % SERVERS], texts[number], 16)
                sent += 1
                texts[number] += f" Assistant: {answer.text}"
                known = computed[number] // PAGE * PAGE
                found.append(
                    {
                        "turn": turn,
                        "known": known,
                        "recomputed": max(0, known - answer.cached_tokens),
                        "ttft": answer.ttft,
                        "sources": answer.sources,
                    }
                )
                computed[number] = answer.prompt_tokens
    later = [one for one in found if one["turn"]]
    return {
        "known": sum(one["known"] for one in later),
        "recomputed": sum(one["recomputed"] for one in later),
        "ttft": spread([one["ttft"] for one in later]).median,
        "answers": found,
    }


if __name__ == "__main__":
    sys.exit(main())

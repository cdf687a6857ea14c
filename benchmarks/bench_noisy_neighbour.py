"""A quiet tenant's conversation with and without another tenant's flood, stock SGLang and ours.

The quiet tenant takes turns in a warm conversation: each sends everything so far and a new message,
so that all but the new message should come from the cache. Solo, nobody else is there. Under the
flood, clients of another tenant always have requests with new prompts in flight; once in each run
the quiet tenant says nothing until the flood has computed a whole pool of tokens, so that the least
recently used pages are those of the conversation.

Engines run one at a time, in the order A B B A, with the same flags and the same step: so many
prompt tokens as ``Size.step`` are computed at once, since a turn waits for the step that runs.
Throughput is that of equal work: so many turns and so many flood requests, however they are mixed.
Ours takes more turns under the flood after that, for the sake of its p99.

On our last engine two backlogged tenants then share: equal weights and prompts ten times as long,
and weights of 1 to 3.
"""

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx
from neighbours import Conversation, Flood, Load, useful_tokens
from shares import SHARING, add_weight, measure_shares

from engines import Answer, Engine, demo_flags, engine, write_policy
from report import Report, arguments, spread

_POOL_TOKENS = 20_000
_PORTS = {"stock": 35101, "ours": 35102}


@dataclass(frozen=True)
class Size:
    """How much of everything: ``turns`` and ``flood_requests`` are the equal work of one run."""

    load: Load = field(default_factory=Load)
    step: int = 128
    conversation: int = 5
    solo_turns: int = 50
    turns: int = 14
    more_turns: int = 36
    flood_requests: int = 80
    pause_requests: int = 33
    runs: tuple[str, ...] = ("stock", "ours", "ours", "stock")
    share_requests: int = 12


_QUICK = Size(
    solo_turns=5, turns=5, more_turns=0, flood_requests=12, pause_requests=2,
    runs=("stock", "ours"), share_requests=6,
)  # fmt: skip


@dataclass
class Outcome:
    """What one engine did in all runs; answers of the quiet tenant by situation."""

    solo: list[Answer] = field(default_factory=list)
    flooded: list[Answer] = field(default_factory=list)
    after_pause: list[Answer] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


class Run:
    """One engine's run: first solo, then the flood."""

    def __init__(self, server: Engine, size: Size, seed: float, outcome: Outcome) -> None:
        self._server = server
        self._size = size
        self._draw = random.Random(seed)
        self._talk = Conversation(server, size.load, self._draw)
        self._taken = 0
        self._outcome = outcome

    def all(self, client: httpx.Client, more_turns: int) -> None:
        """Fill the outcome."""
        self._talk.begin(client)
        self._outcome.solo += self._turns(client, self._size.solo_turns, think=False)
        flood = Flood(self._server, self._size.load, self._draw)
        self._talk.begin(client)
        with flood.running():
            with self._rated(flood):
                self._with_pause(client, flood)
            self._outcome.flooded += self._turns(client, more_turns)

    def _turns(self, client: httpx.Client, count: int, *, think: bool = True) -> list[Answer]:
        """Take turns; a conversation that grew long is followed by a new one."""
        answers = []
        for _ in range(count):
            if self._taken == self._size.conversation:
                self._talk.begin(client)
                self._taken = 0
            if think:
                self._talk.think()
            answers.append(self._talk.turn(client))
            self._taken += 1
        return answers

    def _with_pause(self, client: httpx.Client, flood: Flood) -> None:
        """Take the turns of the equal work, with a pause in the middle, and wait for the flood."""
        half = self._size.turns // 2
        self._outcome.flooded += self._turns(client, half)
        flood.wait(self._size.pause_requests)
        after = self._talk.turn(client)
        self._outcome.after_pause.append(after)
        self._outcome.flooded += [after, *self._turns(client, self._size.turns - half - 1)]
        missing = self._size.flood_requests - len(flood.answers)
        if missing > 0:
            flood.wait(missing)

    @contextmanager
    def _rated(self, flood: Flood) -> Iterator[None]:
        flood.answers.clear()
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        tokens = useful_tokens(self._size.turns, list(flood.answers), self._size.load)
        self._outcome.rates.append(tokens / seconds)


def _measure(size: Size, policy: Path, seed: int, report: Report) -> dict[str, Outcome]:
    outcomes = {"stock": Outcome(), "ours": Outcome()}
    # The same conversations and floods for both.
    draws = {name: random.Random(seed) for name in outcomes}
    last = max(place for place, name in enumerate(size.runs) if name == "ours")
    for place, name in enumerate(size.runs):
        module, flags = _command(name, policy, size)
        more = size.more_turns if name == "ours" else 0
        with (
            engine(name, module, _PORTS[name], flags, "key-quiet") as server,
            httpx.Client(timeout=600) as client,
        ):
            Run(server, size, draws[name].random(), outcomes[name]).all(client, more)
            if place == last:
                measure_shares(report, server, size.share_requests)
    return outcomes


def _command(name: str, policy: Path, size: Size) -> tuple[str, list[str]]:
    """Return module and flags; both engines compute in steps of the same size."""
    flags = [*demo_flags(_POOL_TOKENS), "--chunked-prefill-size", str(size.step)]
    if name == "ours":
        return "sglang_ext.launch_server", ["--tenant-policy", str(policy), *flags]
    return "sglang.launch_server", [*flags, "--enable-metrics", "--enable-cache-report"]


def _p99(answers: list[Answer]) -> float:
    times = sorted(answer.ttft for answer in answers)
    return times[round(0.99 * (len(times) - 1))]


def _cached_share(answers: list[Answer], load: Load) -> float:
    """Return the part that came from the cache of what the tenant had sent or got before."""
    cached = sum(answer.cached_tokens for answer in answers)
    # The last page of a prompt is computed again, whole, and so is a new message.
    known = sum(answer.prompt_tokens for answer in answers) - len(answers) * load.message
    return cached / known


def _record(report: Report, name: str, outcome: Outcome, load: Load) -> dict[str, float]:
    solo, flooded, after = outcome.solo, outcome.flooded, outcome.after_pause
    kept = _cached_share(solo, load)
    figures = {
        "cached tokens kept, flooded over solo": _cached_share(flooded, load) / kept,
        "cached tokens kept, after a pause over solo": _cached_share(after, load) / kept,
        "TTFT p99 solo, s": _p99(solo),
        "TTFT p99 flooded, s": _p99(flooded),
        "TTFT p99, flooded over solo": _p99(flooded) / _p99(solo),
        "useful tokens/s": statistics.median(outcome.rates),
    }
    for key, value in figures.items():
        report.figures[f"{name}: {key}"] = value
    for situation, answers in (("solo", solo), ("flooded", flooded), ("after_pause", after)):
        times = [answer.ttft for answer in answers]
        report.figures[f"{name}: TTFT {situation}, s"] = vars(spread(times))
        runs = [
            {"ttft": a.ttft, "prompt": a.prompt_tokens, "cached": a.cached_tokens} for a in answers
        ]
        report.runs.append({"engine": name, "situation": situation, "turns": runs})
    report.runs.append({"engine": name, "useful tokens/s": outcome.rates})
    return figures


def main() -> int:
    """Run the benchmark and return its exit status."""
    options = arguments("bench_noisy_neighbour", __doc__ or "").parse_args()
    size = _QUICK if options.quick else Size()
    report = Report("A quiet tenant beside a noisy one")
    report.runs.append({"size": asdict(size)})
    with tempfile.TemporaryDirectory() as folder:
        policy = write_policy(Path(folder), ["quiet", "noisy", *SHARING])
        policy.write_text(add_weight(policy.read_text("utf-8")), encoding="utf-8")
        outcomes = _measure(size, policy, options.seed, report)
    stock, ours = (_record(report, name, outcomes[name], size.load) for name in ("stock", "ours"))
    for situation in ("flooded", "after a pause"):
        kept = f"cached tokens kept, {situation} over solo"
        report.at_least(f"ours: {kept}", ours[kept], 0.95)
    slower = "TTFT p99, flooded over solo"
    report.at_most(f"ours: {slower}", ours[slower], 1.5)
    ratio = ours["useful tokens/s"] / stock["useful tokens/s"]
    report.at_least("useful tokens/s, ours over stock", ratio, 0.95)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())

"""What a simulation came to: hits by tier and tenant, times, what was recomputed, what binds."""

import gc
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from sglang_ext.plan.hardware import Cluster
from sglang_ext.plan.requests import PlanRequest
from sglang_ext.plan.simulator import Load, Served, simulate
from sglang_ext.plan.tiers import TierStack
from sglang_ext.types import Tier

__all__ = ["Outcome", "play", "quantile"]

_NOTICED = 0.01


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest of the sorted values that at least ``share`` of them do not exceed."""
    return ordered[max(0, ceil(len(ordered) * share) - 1)] if ordered else 0.0


@dataclass
class Outcome:
    """Sums over all requests, in tokens and seconds; ``add`` each as it ends."""

    ttft: list[float] = field(default_factory=list)
    prompt: Counter[str] = field(default_factory=Counter)
    found: defaultdict[str, Counter[Tier]] = field(default_factory=lambda: defaultdict(Counter))
    known: Counter[str] = field(default_factory=Counter)
    recomputed: Counter[str] = field(default_factory=Counter)
    answers: int = 0
    begin: float = 0.0
    end: float = 0.0
    load: Load = field(default_factory=Load)

    @classmethod
    def of(cls, served: Iterable[Served], load: Load, skip: int = 0) -> "Outcome":
        """Take in the requests of a run but the first ``skip``, which only warm the caches up.

        ``load`` is what the same run reports of its engine, warm-up included.
        """
        outcome = cls(load=load)
        for number, each in enumerate(served):
            if number < skip:
                outcome.begin = each.end
            else:
                outcome.add(each)
        outcome.ttft.sort()
        return outcome

    def add(self, served: Served) -> None:
        """Take in one request."""
        request = served.request
        self.ttft.append(served.ttft)
        self.prompt[request.tenant] += request.prompt
        self.known[request.tenant] += served.known
        self.recomputed[request.tenant] += served.recomputed
        for tier, tokens in served.found.items():
            self.found[request.tenant][tier] += tokens
        self.answers += request.answer
        self.end = max(self.end, served.end)

    @property
    def recomputed_share(self) -> float:
        """Recomputed tokens over known ones, all tenants together."""
        return self.recomputed.total() / max(1, self.known.total())

    @property
    def ceiling(self) -> float:
        """The hit rate of a cache that forgets nothing."""
        return self.known.total() / max(1, self.prompt.total())

    @property
    def hit_rate(self) -> float:
        """Prompt tokens that were not computed."""
        return sum(self.hits(tier) for tier in Tier)

    def hits(self, tier: Tier, tenant: str | None = None) -> float:
        """Return the share of prompt tokens that came from ``tier``, of one tenant or of all."""
        tenants = self.found if tenant is None else (tenant,)
        tokens = sum(self.found[name][tier] for name in tenants)
        prompt = self.prompt.total() if tenant is None else self.prompt[tenant]
        return tokens / max(1, prompt)

    def ttft_quantile(self, share: float) -> float:
        """Return a quantile of the time to the first token, in seconds."""
        return quantile(self.ttft, share)

    @property
    def output_rate(self) -> float:
        """Output tokens a second."""
        return self.answers / (self.end - self.begin) if self.end > self.begin else 0.0

    def busy(self) -> dict[str, float]:
        """Return what share of the time each constraint was at work."""
        end = self.end or 1.0
        return {
            "computing prompts": self.load.prefill / end,
            "the host's work for requests": self.load.host / end,
            "waiting for room in HBM": self.load.no_room / end,
            "waiting for a place in the batch": self.load.no_place / end,
            "reading the disk": self.load.disk / end,
        }

    @property
    def binds(self) -> str:
        """The constraint that was at work most, if any was for a hundredth of the time."""
        busy = self.busy()
        most = max(busy, key=lambda name: busy[name])
        return most if busy[most] >= _NOTICED else "nothing"


def play(
    requests: Iterable[PlanRequest], cluster: Cluster, tiers: TierStack, skip: int = 0, **how: Any
) -> Outcome:
    """Simulate to the end and add up all requests but the first ``skip``.

    ``how`` is what ``simulate`` takes besides. Python's garbage collector rests meanwhile: a
    simulation keeps millions of objects and makes no cycles, so that it would only be slower.
    """
    load = Load()
    with _collector_at_rest():
        return Outcome.of(simulate(requests, cluster, tiers, load=load, **how), load, skip)


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()

"""Serves requests on a virtual clock: what hits where, who waits how long, what is computed again.

Discrete events: a request arrives, a prefill ends, an answer ends. Prefills run one after the
other and before decoding, as SGLang schedules them; while none runs, all answers advance together,
step by step (processor sharing: a step's length depends on how many there are and what they hold).
What the host does for a request (reading, tokenizing, scheduling) is one process's work: requests
queue for it before they wait for the GPUs.
Who is prefilled next, what leaves a tier, what a quota allows, when a page ages and whether a lower
tier is worth loading from are decided by the code that decides it in the server.

Copies from host memory run while the model computes; those from the disk start when the request
arrives and share one channel. A request waits for them no longer than the choice promised.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf

from sglang_ext.plan.hardware import Cluster
from sglang_ext.plan.requests import PlanRequest
from sglang_ext.plan.tiers import TierStack
from sglang_ext.tenancy.fairness import OUTPUT_WEIGHT, FairShares, Waiting
from sglang_ext.types import TenantId, Tier

__all__ = ["Load", "Served", "simulate"]

_LOOKAHEAD = 64
"""So many waiting requests are put into an order at once; the server looks at all."""


@dataclass(slots=True)
class Served:
    """A request as it went: seconds, and tokens of its prompt by where they came from."""

    request: PlanRequest
    ttft: float = 0.0
    end: float = 0.0
    known: int = 0
    """What this tenant had computed before: what a cache that never forgets would have."""
    found: dict[Tier, int] = field(default_factory=dict)

    @property
    def cached(self) -> int:
        """Tokens that were not computed."""
        return sum(self.found.values())

    @property
    def recomputed(self) -> int:
        """Tokens that were known and were computed again."""
        return max(0, self.known - self.cached)


@dataclass(slots=True)
class Load:
    """Seconds for which an engine computed prompts, and for which requests waited for something."""

    prefill: float = 0.0
    host: float = 0.0
    no_room: float = 0.0
    no_place: float = 0.0
    disk: float = 0.0


@dataclass(slots=True)
class _Decoding:
    """The answers that are being written, which all advance by one token a step."""

    steps: float = 0.0
    tokens: float = 0.0
    ends: list[tuple[float, int, Served, Callable[[], None]]] = field(default_factory=list)

    def add(
        self, number: int, served: Served, release: Callable[[], None], more_steps: float
    ) -> None:
        end = self.steps + served.request.answer + more_steps
        heappush(self.ends, (end, number, served, release))
        self.tokens += served.request.prompt

    def pop(self) -> tuple[Served, Callable[[], None]]:
        _, _, served, release = heappop(self.ends)
        # While it was written it held its prompt and, in the mean, half of its answer.
        self.tokens -= served.request.prompt
        return served, release


class _Engine:
    def __init__(
        self,
        cluster: Cluster,
        tiers: TierStack,
        weight: Callable[[TenantId], float],
        most: int,
        load: Load,
    ) -> None:
        self._cluster = cluster
        self._tiers = tiers
        self._most = most
        self._load = load
        self._blocked: str | None = None
        self._step: float | None = None
        self._host: deque[tuple[float, PlanRequest]] = deque()
        self._host_free = 0.0
        self._fair = FairShares(weight)
        self._waiting: deque[tuple[Waiting, PlanRequest]] = deque()
        self._tenants: Counter[TenantId] = Counter()
        self._decoding = _Decoding()
        self._numbers = count()
        self._own_numbers: dict[str, Iterator[int]] = {}
        self.now = 0.0
        self._prefill: tuple[float, Served, Callable[[], None]] | None = None

    # ---- what happens next

    def next_event(self) -> float:
        """Return when something happens here without another arrival; infinity: never."""
        at_host = self._host[0][0] if self._host else inf
        return min(at_host, self._next_on_gpu())

    def _next_on_gpu(self) -> float:
        if self._prefill is not None:
            return self._prefill[0]
        if self._decoding.ends:
            left = self._decoding.ends[0][0] - self._decoding.steps
            return self.now + left * self._step_seconds()
        return inf

    def advance(self, to: float) -> Iterator[Served]:
        """Let everything happen until ``to``, and yield the requests that end."""
        while (event := self.next_event()) <= to:
            self._decode_until(event)
            if self._host and self._host[0][0] <= event:
                self._wait(self._host.popleft()[1])
            elif self._prefill is not None:
                self._end_prefill()
            else:
                yield self._end_answer()
            self._begin_prefill()
        self._decode_until(to)

    def _decode_until(self, then: float) -> None:
        if self._blocked is not None:
            waited = getattr(self._load, self._blocked) + then - self.now
            setattr(self._load, self._blocked, waited)
        if self._prefill is None and self._decoding.ends:
            self._decoding.steps += (then - self.now) / self._step_seconds()
        self.now = then

    def _step_seconds(self) -> float:
        if self._step is None:
            running = len(self._decoding.ends)
            self._step = self._cluster.decode_seconds(running, self._decoding.tokens)
        return self._step

    # ---- requests

    def arrive(self, request: PlanRequest) -> None:
        """Take in a request at its time."""
        seconds = self._cluster.efficiency.host_seconds
        if not seconds:
            self._wait(request)
            self._begin_prefill()
            return
        self._load.host += seconds
        self._host_free = max(self._host_free, self.now) + seconds
        self._host.append((self._host_free, request))

    def _wait(self, request: PlanRequest) -> None:
        tenant = TenantId(request.tenant)
        self._tenants[tenant] += 1
        self._fair.arrive(tenant)
        number = next(self._own_numbers.setdefault(request.tenant, count()))
        waiting = Waiting(tenant, next(self._numbers), number, request.prompt)
        self._waiting.append((waiting, request))

    def _begin_prefill(self) -> None:
        self._blocked = None
        if self._prefill is not None or not self._waiting:
            return
        if len(self._decoding.ends) >= self._most:
            self._blocked = "no_place"
            return
        place = self._next_place()
        waiting, request = self._waiting[place]
        self._tiers.tick(self.now)
        known = self._tiers.known(request)
        placed = self._tiers.place(request, known)
        if placed is None and self._decoding.ends:
            # No room until an answer ends. Alone, it is computed without being kept.
            self._blocked = "no_room"
            return
        del self._waiting[place]
        self._fair.observe(self._tenants.keys())
        self._leave(waiting.tenant)
        served = Served(request, known=known)
        release: Callable[[], None] = _nothing
        if placed is not None:
            served.found, release = placed.found, placed.release
        self._fair.charge(waiting.tenant, request.prompt - served.cached)
        ready = self._ready(served, placed.choice if placed is not None else {})
        self._load.prefill += ready - self.now
        self._prefill = (ready, served, release)

    def _leave(self, tenant: TenantId) -> None:
        self._tenants[tenant] -= 1
        if not self._tenants[tenant]:
            del self._tenants[tenant]

    def _next_place(self) -> int:
        if len(self._waiting) == 1:
            return 0
        window = [self._waiting[place][0] for place in range(min(len(self._waiting), _LOOKAHEAD))]
        return self._fair.order(window, limit=1)[0]

    def _ready(self, served: Served, loads: dict[Tier, int]) -> float:
        """Return when the first token is there, and let the tiers know how long all took."""
        new = served.request.prompt - served.cached
        compute = self._cluster.prefill_seconds(max(1, new), served.cached)
        up = self._cluster.load_seconds(sum(loads.values()))
        disk = self._tiers.fetch(loads.get(Tier.NVME, 0), served.request.at)
        self._tiers.measured(new, compute, loads, up)
        self._load.disk += self._tiers.disk_seconds(loads.get(Tier.NVME, 0))
        return max(self.now, disk) + max(compute, up) + self._cluster.efficiency.step_seconds

    def _end_prefill(self) -> None:
        assert self._prefill is not None
        ended, served, release = self._prefill
        self._prefill = None
        served.ttft = ended - served.request.at + self._cluster.efficiency.request_seconds
        self._tiers.computed(served.request)
        # What a request costs besides its kernels keeps its client waiting as well.
        more_steps = self._cluster.efficiency.request_seconds / self._step_seconds()
        self._decoding.add(next(self._numbers), served, release, more_steps)
        self._step = None

    def _end_answer(self) -> Served:
        served, release = self._decoding.pop()
        self._step = None
        release()
        served.end = self.now
        self._tiers.answered(served.request)
        self._fair.charge(TenantId(served.request.tenant), OUTPUT_WEIGHT * served.request.answer)
        return served


def _nothing() -> None:
    """Release what was never kept."""


def simulate(
    requests: Iterable[PlanRequest],
    cluster: Cluster,
    tiers: TierStack,
    *,
    clients: int | None = None,
    weight: Callable[[TenantId], float] = lambda _: 1.0,
    most_running: int = 256,
    load: Load | None = None,
) -> Iterator[Served]:
    """Yield every request as it ends. ``requests`` come in the order of their arrival.

    A turn of a conversation arrives when its time has come and the turn before has ended. With
    ``clients`` their times do not count: each client sends the next request of the row when it has
    its answer, which is the closed loop of ``benchmarks.rag_chat``. ``load`` is filled as it runs.
    """
    line = _Line(_Engine(cluster, tiers, weight, most_running, load or Load()))
    for request in requests:
        if clients is None:
            yield from line.until(request.at)
        while clients is not None and line.inside >= clients:
            yield from line.until(line.next_event())
        line.enter(request, at_once=clients is not None)
    while line.next_event() < inf:
        yield from line.until(line.next_event())


class _Line:
    """In front of an engine: a turn waits here until the one before it has ended."""

    def __init__(self, engine: _Engine) -> None:
        self._engine = engine
        self._running: set[int] = set()
        self._waiting: dict[int, deque[PlanRequest]] = {}
        self.inside = 0
        """Requests that entered and have not ended."""

    def next_event(self) -> float:
        return self._engine.next_event()

    def enter(self, request: PlanRequest, *, at_once: bool) -> None:
        """Take in a request at its time, or now."""
        self.inside += 1
        request = request._replace(at=self._engine.now) if at_once else request
        if request.conversation in self._running:
            self._waiting.setdefault(request.conversation, deque()).append(request)
        else:
            self._arrive(request)

    def until(self, then: float) -> Iterator[Served]:
        """Let everything happen until ``then``, and yield the requests that end."""
        for served in self._engine.advance(then):
            self.inside -= 1
            self._next_turn(served.request.conversation)
            yield served

    def _next_turn(self, conversation: int) -> None:
        self._running.discard(conversation)
        waiting = self._waiting.get(conversation)
        if waiting:
            self._arrive(waiting.popleft())
        if not waiting:
            self._waiting.pop(conversation, None)

    def _arrive(self, request: PlanRequest) -> None:
        self._running.add(request.conversation)
        self._engine.arrive(request._replace(at=max(request.at, self._engine.now)))

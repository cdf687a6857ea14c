"""Who is served next: the tenant that got least for its weight, and inside it who hits most.

Every tenant has a counter of the tokens computed for it, divided by its weight (VTC, arXiv
2401.00588). The smallest counter goes first, so that tenants which always wait are served in
proportion to their weights, however long their prompts. A tenant that comes back is lifted to at
most one quantum below the others: it cannot save up service, yet it need not queue behind a flood.

Locality-aware schedulers (DLPM, arXiv 2501.14312) reorder all requests by cached prefix until a
deficit stops them. Across tenants that would show in one tenant's latency what another has cached,
so here a cached prefix reorders a tenant's own requests only, and only LOCALITY of them at a time.

No starvation. A round admits the first request of ``order``. Let every request compute between 1
and M weighted tokens, F of them per tenant in flight at once, and let a request r of tenant i come
when n others of i wait. Then r is admitted after at most

    k + sum over tenants j != i of (w_j / w_i * (k * M + F) + w_j * Q + F + M)   rounds

with k = n + LOCALITY and the quantum Q. Proof. (1) A tenant's requests are numbered as they come
and go in groups of LOCALITY numbers, a group after the one before; only later requests of r's own
group can overtake it, so that at most n + LOCALITY - 1 requests of i go first. (2) They raise i's
counter by at most k * M / w_i. (3) When r comes, i's counter is at most F / w_i above the floor: i
was smallest when it was last admitted, and only what was in flight came on top. (4) While r
waits, j is admitted only when its counter is not above i's, and j enters at most Q below the floor;
so j computes at most w_j times the rise of (2) and (3), plus w_j * Q, plus what is in flight and
the one request that crosses. (5) A round computes at least one token, and there are finitely many
tenants. QED.

A long prompt is computed in chunks, a chunk a round, and may have to wait again between two of
them: R times at most (``tenancy.retraction``), after which it goes on to its end. What it computed
stays cached and is its tenant's next request, so that nothing above changes; where even that was
evicted it is computed again, so that M counts (R + 1) times.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

from sglang_ext.types import TenantId

__all__ = ["LOCALITY", "OUTPUT_WEIGHT", "QUANTUM_TOKENS", "FairShares", "Waiting"]

LOCALITY = 16
"""So many consecutive requests of one tenant may change places for the sake of a cached prefix."""

OUTPUT_WEIGHT = 2.0
"""What a generated token counts against a prompt token: it reads the whole model for itself."""

QUANTUM_TOKENS = 512
"""Weighted tokens, for each unit of weight, that a tenant which comes back may be ahead of those
that kept waiting."""


@dataclass(slots=True)
class Waiting:
    """One waiting request, and its prompt tokens by cache state.

    ``arrival`` counts the requests of all tenants, ``number`` those of its own.
    """

    tenant: TenantId
    arrival: int
    number: int
    uncached: int
    cached: int = 0

    @property
    def place(self) -> tuple[int, int, int]:
        """Sorts a tenant's own requests: by group, then the longest cached prefix, then age."""
        return (self.number // LOCALITY, -self.cached, self.number)


class FairShares:
    """The counters. ``weight`` tells a tenant's weight, above 0, and may change at any time.

    ``arrive`` is called for each request that starts to wait, ``observe`` before each ``order``.
    """

    def __init__(self, weight: Callable[[TenantId], float], quantum: int = QUANTUM_TOKENS) -> None:
        self._weight = weight
        self._quantum = quantum
        self._counters: dict[TenantId, float] = {}
        self._waiting: frozenset[TenantId] = frozenset()
        # No tenant that kept waiting is below it; it never falls.
        self._floor = 0.0

    def counter(self, tenant: TenantId) -> float:
        """Return the weighted tokens computed for ``tenant`` over its weight. O(1)."""
        return self._counters.get(tenant, self._floor)

    def charge(self, tenant: TenantId, tokens: float) -> None:
        """Book weighted tokens that were computed for ``tenant``. O(1)."""
        self._counters[tenant] = self.counter(tenant) + tokens / self._weight(tenant)

    def arrive(self, tenant: TenantId) -> None:
        """Note that ``tenant`` waits; it is lifted when it did not. O(waiting tenants) then."""
        if tenant not in self._waiting:
            self.observe(self._waiting | {tenant})

    def observe(self, waiting: Iterable[TenantId]) -> None:
        """Note who waits now, and lift who did not to a quantum below those who did.

        When nobody kept waiting, the last ones to leave are the measure. O(waiting tenants).
        """
        now = frozenset(waiting)
        stayed = [self.counter(tenant) for tenant in self._waiting & now]
        left = [self.counter(tenant) for tenant in self._waiting - now]
        if stayed or left:
            self._floor = max(self._floor, min(stayed) if stayed else max(left))
        for tenant in now - self._waiting:
            lowest = self._floor - self._quantum
            self._counters[tenant] = max(self._counters.get(tenant, 0.0), lowest)
        self._waiting = now

    def behind(self, tenant: TenantId, other: TenantId) -> float:
        """Return how far the counter of ``tenant`` is below that of ``other``."""
        return self.counter(other) - self.counter(tenant)

    def deficits(self) -> dict[TenantId, float]:
        """Return what each waiting tenant lacks to its fair share, in tokens; negative: it is over.

        They sum to 0: what some lack, the others have had. O(waiting tenants).
        """
        weights = {tenant: self._weight(tenant) for tenant in self._waiting}
        total = sum(weights.values())
        mean = sum(weight * self.counter(name) for name, weight in weights.items()) / (total or 1)
        return {name: (mean - self.counter(name)) * weight for name, weight in weights.items()}

    def order(self, waiting: Sequence[Waiting], limit: int | None = None) -> list[int]:
        """Return the indices of ``waiting`` in the order to admit them.

        Who has the smallest counter goes next, as if each prompt were charged when it is placed;
        of equals the one with the oldest request, wherever its cache puts that one. Every request
        is in the result, those beyond the first ``limit`` in the order they were given. Changes
        nothing. O(n + (tenants + limit) log tenants), and the sort of each tenant's own requests.
        """
        queues = _by_tenant(waiting)
        heap = [
            (self.counter(tenant), min(waiting[index].arrival for index in queue), tenant)
            for tenant, queue in queues.items()
        ]
        heapify(heap)
        placed: list[int] = []
        while heap and (limit is None or len(placed) < limit):
            counter, oldest, tenant = heap[0]
            placed.append(queues[tenant].pop())
            if queues[tenant]:
                charge = max(waiting[placed[-1]].uncached, 1) / self._weight(tenant)
                heapreplace(heap, (counter + charge, oldest, tenant))
            else:
                heappop(heap)
        return placed + _rest(placed, len(waiting))


def _by_tenant(waiting: Sequence[Waiting]) -> dict[TenantId, list[int]]:
    """Return the indices of each tenant's requests, the next one last."""
    queues: dict[TenantId, list[int]] = {}
    for index, request in enumerate(waiting):
        queues.setdefault(request.tenant, []).append(index)
    for queue in queues.values():
        queue.sort(key=lambda index: waiting[index].place, reverse=True)
    return queues


def _rest(placed: Sequence[int], count: int) -> list[int]:
    if len(placed) == count:
        return []
    seen = set(placed)
    return [index for index in range(count) if index not in seen]

"""What the scheduler process knows about tenants, and the hooks that keep it up to date.

a request arrives   patches.admission        refused, or given a ticket
each step           get_next_batch_to_run    clock, ledger of what runs, metrics
order of the queue  patches.schedule_policy  by FairShares
admission           patches.admission        by headroom
a batch runs        run_batch                each tenant is charged, sealed tenants' slots are noted
memory is short     patches.retraction       who was over its share gives first
"""

import functools
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from sglang_ext.namespace import SYSTEM_OWNER, is_sealed, parse
from sglang_ext.patches.hooks import Hook
from sglang_ext.tenancy.backlog import Backlog
from sglang_ext.tenancy.fairness import OUTPUT_WEIGHT, QUANTUM_TOKENS, FairShares, Waiting
from sglang_ext.tenancy.identity import tenant_of_id
from sglang_ext.tenancy.policy import Policy, TenantPolicy
from sglang_ext.types import SYSTEM_TENANT, Owner, TenantId, Tier

__all__ = ["SchedulerObserver", "TenantScheduling", "Ticket", "last_token", "scheduling_hooks"]

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"
_METRICS_SECONDS = 1.0


@dataclass(slots=True)
class Ticket(Waiting):
    """What we remember of a request, from its arrival to its end, retractions included."""

    owner: Owner = SYSTEM_OWNER
    admitted: bool = False
    matched_in_pass: int | None = None
    """The admission pass in which ``cached`` and ``uncached`` were last looked up."""


class SchedulerObserver(Protocol):
    """Publishes what the scheduler does; see ``sglang_ext.scheduler_metrics``."""

    def admitted(self, tenant: TenantId, seconds: float) -> None: ...

    def computes(
        self,
        tenant: TenantId,
        namespace: str,
        prompt: Sequence[int],
        cached: int,
        page_size: int,
        first: bool = True,
    ) -> None: ...

    def skipped(self, tenant: TenantId, reason: str) -> None: ...

    def refused(self, tenant: TenantId, reason: str) -> None: ...

    def preempted(self, tenant: TenantId, reason: str) -> None: ...

    def due(self, seconds: float) -> bool: ...

    def publish(
        self, queued: Mapping[TenantId, int], deficits: Mapping[TenantId, float], cache: Any
    ) -> None: ...


class TenantScheduling:
    """One for each scheduler process. ``cache`` is set once SGLang has built it.

    ``growth`` is what requests in flight may still take until their last token, by owner, as of the
    beginning of the step and only where the policy is ``limited``. ``blocked`` are
    owners whose next request was refused room, with the tokens that it needs. ``front`` is the
    waiting request that is next in this pass. ``limited``: some
    owner has a hard quota or a reserve; without, SGLang's own budget is all that counts.
    ``has_classes``: there are service classes of which one could give way to another.
    """

    cache: Any

    def __init__(self, policy: Policy, observer: Callable[[], SchedulerObserver]) -> None:
        """``observer`` is called in the scheduler's process, on the rank that publishes."""
        self.make_observer = observer
        self.shares = FairShares(lambda tenant: self.tenant(tenant).weight)
        self.backlog = Backlog(lambda req: self.ticket(req).tenant)
        self.fair = False
        self.metrics: SchedulerObserver | None = None
        self.growth: Counter[Owner] = Counter()
        self.blocked: dict[Owner, int] = {}
        self.waiting_owners: set[Owner] = set()
        self.front: Any = None
        self.last_wait: dict[TenantId, float] = {}
        self._arrivals = 0
        self._numbers: Counter[TenantId] = Counter()
        self.use(policy)

    def use(self, policy: Policy) -> None:
        """Let this policy hold from now on. What runs goes on; tickets stay as they are."""
        self.policy = policy
        tenants = policy.tenants.values()
        self.reserves = any(tenant.reserve.hbm is not None for tenant in tenants)
        self.hard = {tenant.owner for tenant in tenants if tenant.quota.hard}
        self.limited = self.reserves or bool(self.hard)
        own = [tenant.sla for tenant in tenants if tenant.name != SYSTEM_TENANT]
        self.has_classes = len(set(own)) > 1
        self.blocked.clear()

    def tenant(self, name: TenantId) -> TenantPolicy:
        """Return what holds for a tenant; one that the policy does not know is the system's."""
        return self.policy.tenants.get(name) or self.policy.tenants[SYSTEM_TENANT]

    def ticket(self, req: Any) -> Ticket:
        """Return the ticket of a request, a fresh one on the first call."""
        found: Ticket | None = getattr(req, "tenant_ticket", None)
        if found is not None:
            return found
        name = self.tenant(tenant_of_id(req.rid)).name
        prompt = len(req.origin_input_ids)
        ticket = Ticket(name, self._arrivals, self._numbers[name], prompt)
        ticket.owner = _owner(req.extra_key)
        self._arrivals += 1
        self._numbers[name] += 1
        req.tenant_ticket = ticket
        return ticket

    def arrived(self, req: Any, queue: Sequence[Any]) -> None:
        """Note that ``req`` is about to be appended to the waiting ``queue``."""
        self.backlog.counts(queue)
        self.backlog.append(req)
        self.shares.arrive(self.ticket(req).tenant)

    def admitted(self, req: Any) -> None:
        """Note that ``req`` is in the next batch; its wait counts once, however often it is."""
        ticket = self.ticket(req)
        if self.metrics is not None:
            text = req.extra_key, req.origin_input_ids, int(req.prefix_len), self.cache.page_size
            self.metrics.computes(ticket.tenant, *text, first=not ticket.admitted)
        if ticket.admitted:
            return
        ticket.admitted = True
        wait = time.perf_counter() - req.time_stats.wait_queue_entry_time
        self.last_wait[ticket.tenant] = wait
        if self.metrics is not None:
            self.metrics.admitted(ticket.tenant, wait)

    def skipped(self, req: Any, reason: str) -> None:
        """Count that a pass went on or ended without ``req``, which was next of its owner."""
        if self.metrics is not None:
            self.metrics.skipped(self.ticket(req).tenant, reason)

    def preempted(self, req: Any, reason: str) -> None:
        """Count that ``req`` gave way, and take back what it would still have taken."""
        ticket = self.ticket(req)
        if self.limited:
            self.growth[ticket.owner] -= max(0, last_token(req) - req.kv.kv_allocated_len)
        if self.metrics is not None:
            self.metrics.preempted(ticket.tenant, reason)

    def is_owed_a_step(self, tenant: TenantId, other: TenantId) -> bool:
        """Tell whether ``tenant`` is so far behind ``other`` that it gets a step without it."""
        return self.shares.behind(tenant, other) >= QUANTUM_TOKENS / 2

    def is_behind(self, tenant: TenantId, other: TenantId) -> bool:
        """Tell whether ``tenant`` has had less for its weight than ``other``."""
        return self.shares.behind(tenant, other) > 0

    def has_reserve_waiting(self, but: Owner) -> bool:
        """Tell whether anyone else waits who has room that nobody else may take."""
        return self.reserves and any(
            self.unused_reserve(owner) > 0 for owner in self.waiting_owners if owner != but
        )

    def unused_reserve(self, owner: Owner) -> int:
        """Return how many tokens of its reserve neither run nor will, as far as is known."""
        return int(self.cache.limits(owner).reserve) - self._fixed(owner)

    def quota_left(self, owner: Owner) -> float:
        """Return how many tokens a new request of ``owner`` may take by its hard quota."""
        limits = self.cache.limits(owner)
        if not limits.hard or limits.quota is None:
            return math.inf
        return float(limits.quota - self._fixed(owner))

    def _fixed(self, owner: Owner) -> int:
        """Return what requests of ``owner`` lock, hold and will still take."""
        usage = self.cache.ledger.usage(owner, Tier.HBM)
        return int(usage.protected + usage.running + self.growth[owner])

    @contextmanager
    def allocating(self, tokens: Mapping[Owner, int]) -> Iterator[None]:
        """Within, these owners get these tokens: they make room, and are asked first to."""
        for owner in self.hard & tokens.keys():
            self.cache.enforce_hard_quota(owner, tokens[owner])
        with self.cache.as_requester(tokens):
            yield

    def count_running(self, requests: Iterable[Any]) -> None:
        """Take in what is in flight at the beginning of a step. O(requests), each step."""
        alive = [req for req in requests if req.finished_reason is None]
        running: dict[Owner, int] = {}
        for req in alive:
            owner, kv = self.ticket(req).owner, req.kv
            held = kv.kv_allocated_len - kv.cache_protected_len
            running[owner] = running.get(owner, 0) + (held if held > 0 else 0)
        self.cache.ledger.set_running(running)
        self.growth = self._growth(alive) if self.limited else self.growth

    def _growth(self, requests: Iterable[Any]) -> Counter[Owner]:
        growth: Counter[Owner] = Counter()
        for req in requests:
            growth[self.ticket(req).owner] += max(0, last_token(req) - req.kv.kv_allocated_len)
        return growth

    def charge(self, batch: Any) -> None:
        """Book what ``batch`` computes: its uncached prompt tokens, and a token a decoding row."""
        tokens: defaultdict[TenantId, float] = defaultdict(float)
        for req, amount in zip(batch.reqs, _amounts(batch), strict=True):
            tokens[self.ticket(req).tenant] += amount
        for tenant, amount in tokens.items():
            self.shares.charge(tenant, amount)

    def note_sealed(self, batch: Any) -> None:
        """Have what ``batch`` writes for sealed owners zeroed when it is freed. O(rows).

        Rows of others in the same batch are zeroed as well: that costs less than telling which.
        """
        sealing = self.cache.sealing
        if sealing is not None and any(is_sealed(self.ticket(req).owner) for req in batch.reqs):
            sealing.in_hbm(batch.out_cache_loc)

    def publish(self, waiting: list[Any]) -> None:
        """Publish the gauges, on the rank that has metrics and at most once a second."""
        if self.metrics is not None and self.metrics.due(_METRICS_SECONDS):
            self.metrics.publish(self.backlog.counts(waiting), self.shares.deficits(), self.cache)


def last_token(req: Any) -> int:
    """Return the length that a request's KV may reach, in tokens before rounding to pages."""
    return len(req.origin_input_ids) + (req.sampling_params.max_new_tokens or 0)


def scheduling_hooks(scheduling: TenantScheduling) -> list[Hook]:
    """Return the hooks that keep ``scheduling`` up to date."""

    def get_next_batch_to_run(
        original: Callable[..., Any], scheduler: Any, running_batch: Any, last_batch: Any
    ) -> Any:
        scheduling.cache.tick()
        scheduling.count_running(_in_flight(scheduler, running_batch, last_batch))
        scheduling.publish(scheduler.waiting_queue)
        if scheduling.fair:
            # SGLang then asks the adder for room in every pass, even where a batch was full.
            scheduler.enable_priority_preemption = scheduling.has_classes
        return original(scheduler, running_batch=running_batch, last_batch=last_batch)

    def run_batch(
        original: Callable[..., Any], scheduler: Any, batch: Any, pp_proxy_tensors: Any = None
    ) -> Any:
        scheduling.charge(batch)
        scheduling.note_sealed(batch)
        return original(scheduler, batch, pp_proxy_tensors)

    def update_running_batch(original: Callable[..., Any], scheduler: Any, batch: Any) -> Any:
        with scheduling.allocating(Counter(scheduling.ticket(req).owner for req in batch.reqs)):
            return original(scheduler, batch)

    def prepare_for_extend(original: Callable[..., None], batch: Any) -> None:
        tokens: Counter[Owner] = Counter()
        for req in batch.reqs:
            tokens[scheduling.ticket(req).owner] += req.extend_len
        with scheduling.allocating(tokens):
            original(batch)

    step = ("self", "running_batch", "last_batch")
    return [
        Hook(f"{_SCHEDULER}.get_next_batch_to_run", get_next_batch_to_run, step),
        Hook(f"{_SCHEDULER}.run_batch", run_batch, ("self", "batch", "pp_proxy_tensors")),
        Hook(f"{_SCHEDULER}.update_running_batch", update_running_batch, ("self", "batch")),
        Hook(f"{_BATCH}.prepare_for_extend", prepare_for_extend, ("self",)),
    ]


def _in_flight(scheduler: Any, running_batch: Any, last_batch: Any) -> set[Any]:
    """Return the requests that hold KV: decoding, just prefilled, or between two chunks."""
    batches = [running_batch, last_batch]
    if hasattr(scheduler, "running_mbs"):
        batches += [*scheduler.running_mbs, *scheduler.mbs]
    found = {req for batch in batches if batch is not None for req in batch.reqs}
    if scheduler.chunked_req is not None:
        found.add(scheduler.chunked_req)
    return found


def _amounts(batch: Any) -> list[float]:
    """Return the weighted tokens that each row of ``batch`` computes."""
    rows = len(batch.reqs)
    if not batch.forward_mode.is_extend() or batch.extend_lens is None:
        return [OUTPUT_WEIGHT] * rows
    decoding = len(batch.decoding_reqs or ())
    return [*batch.extend_lens[: rows - decoding], *([OUTPUT_WEIGHT] * decoding)]


@functools.lru_cache(maxsize=4096)
def _owner(extra_key: str | None) -> Owner:
    return parse(extra_key).owner

"""Schedule policy ``tenant-fair``: the waiting queue in the order of ``tenancy.fairness``.

SGLang's LPM sorts all requests by cached prefix, which starves whoever has none and shows to one
tenant what another has cached. Here the prefix decides among a few requests of one tenant only.
"""

from collections.abc import Callable, Iterator
from typing import Any, get_type_hints

from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.mem_cache.common import match_kv_cache

from sglang_ext.patches.hooks import Hook
from sglang_ext.patches.scheduling import TenantScheduling, Ticket
from sglang_ext.tenancy.fairness import LOCALITY
from sglang_ext.types import Owner, TenantId

__all__ = ["TENANT_FAIR", "TenantFairPolicy", "offer_tenant_fair", "policy_hooks"]

TENANT_FAIR = "tenant-fair"

_TARGET = "sglang.srt.managers.scheduler.Scheduler.init_schedule_policy"
_ORDERED = 512
"""So many requests are put in order; no pass admits more."""
_MATCHES = 128
"""So many prefixes are looked up in a pass, as in SGLang's LPM."""
_REMATCH_PASSES = 16
"""A looked up prefix counts for so many passes; ranks agree on passes, not on seconds."""


class TenantFairPolicy(SchedulePolicy):
    """Sorts the waiting queue in place once a pass."""

    def __init__(self, scheduling: TenantScheduling, **settings: Any) -> None:
        super().__init__("fcfs", **settings)
        self._scheduling = scheduling
        self._passes = 0

    def calc_priority(
        self, waiting_queue: list[Any], running_batch: Any = None, processed_tokens: int = 0
    ) -> None:
        """Put first who is owed most, last those whose owner may not get more just now."""
        self._passes += 1
        if self._passes % _REMATCH_PASSES == 0:
            # What was cached meanwhile may make a request fit.
            self._scheduling.blocked.clear()
        tickets = [self._scheduling.ticket(req) for req in waiting_queue]
        shares = self._scheduling.shares
        shares.observe(ticket.tenant for ticket in tickets)
        self._match(waiting_queue, tickets)
        order = shares.order(tickets, _ORDERED)
        self._scheduling.waiting_owners = {ticket.owner for ticket in tickets}
        held = self._held(self._scheduling.waiting_owners)
        if held:
            order.sort(key=lambda index: tickets[index].owner in held)
        waiting_queue[:] = [waiting_queue[index] for index in order]
        self._scheduling.front = waiting_queue[0] if waiting_queue else None

    def waiting_queue_prefix_matched(self, waiting_queue: list[Any]) -> bool:
        """Tell SGLang's load report that not every waiting request was matched."""
        return False

    def shortest_prefill_chunk_limit(
        self, chunked_req: Any, waiting_queue: list[Any], budget: int, page_size: int
    ) -> int | None:
        """Return how many tokens of a long prompt to compute when others are owed this step.

        What the first requests of the queue need is left for them, as far as they fit whole: SGLang
        follows one prompt at a time over several steps. None: as many as fit.
        """
        reserved = 0
        for work in self._owed_work(chunked_req, waiting_queue):
            pages = -(-work // page_size) * page_size
            if reserved + pages > budget - page_size:
                break
            reserved += pages
        return (budget - reserved) // page_size * page_size if reserved else None

    def _owed_work(self, chunked_req: Any, waiting_queue: list[Any]) -> Iterator[int]:
        """Yield the uncached tokens of the requests that go before this prompt, in order."""
        scheduling = self._scheduling
        tenant = scheduling.ticket(chunked_req).tenant
        for req in waiting_queue:
            ticket = scheduling.ticket(req)
            if not scheduling.is_owed_a_step(ticket.tenant, tenant):
                return
            yield max(ticket.uncached, 1)

    def _match(self, waiting_queue: list[Any], tickets: list[Ticket]) -> None:
        """Look up the prefixes that may change an order: in the next group of each tenant."""
        groups: dict[TenantId, int] = {}
        for ticket in tickets:
            group = ticket.number // LOCALITY
            groups[ticket.tenant] = min(group, groups.get(ticket.tenant, group))
        left = _MATCHES
        for req, ticket in zip(waiting_queue, tickets, strict=True):
            if ticket.number // LOCALITY == groups[ticket.tenant] and self._is_stale(ticket):
                match_kv_cache(req, self.tree_cache)
                prompt = len(req.origin_input_ids) + len(req.output_ids)
                ticket.cached = req.num_matched_prefix_tokens
                ticket.uncached = prompt - ticket.cached
                ticket.matched_in_pass = self._passes
                left -= 1
            if not left:
                return

    def _is_stale(self, ticket: Ticket) -> bool:
        last = ticket.matched_in_pass
        return last is None or self._passes - last >= _REMATCH_PASSES

    def _held(self, owners: set[Owner]) -> set[Owner]:
        """Return the owners whose next request was refused room and would be refused again."""
        scheduling = self._scheduling
        blocked = scheduling.blocked
        still = owners & blocked.keys()
        held = {owner for owner in still if scheduling.quota_left(owner) < blocked[owner]}
        scheduling.blocked = {owner: blocked[owner] for owner in held}
        return held


def offer_tenant_fair() -> None:
    """Let SGLang's command line accept ``--schedule-policy tenant-fair``. Idempotent."""
    from sglang.srt.server_args import ServerArgs

    hints = get_type_hints(ServerArgs, include_extras=True)
    choices = hints["schedule_policy"].__metadata__[0].choices
    if TENANT_FAIR not in choices:
        choices.append(TENANT_FAIR)


def policy_hooks(scheduling: TenantScheduling) -> list[Hook]:
    """Return the hook that makes the policy, and tells ``scheduling`` of the scheduler's cache."""

    def init_schedule_policy(original: Callable[..., None], scheduler: Any) -> None:
        chosen = scheduler.schedule_policy
        scheduling.fair = chosen == TENANT_FAIR
        scheduling.cache = scheduler.tree_cache
        scheduler.tenant_scheduling = scheduling
        scheduling.metrics = scheduling.make_observer() if _publishes() else None
        if not scheduling.fair:
            original(scheduler)
            return
        scheduler.schedule_policy = "fcfs"
        original(scheduler)
        scheduler.schedule_policy = chosen
        scheduler.policy = TenantFairPolicy(
            scheduling,
            tree_cache=scheduler.tree_cache,
            enable_hierarchical_cache=scheduler.enable_hierarchical_cache,
            enable_priority_scheduling=scheduler.enable_priority_scheduling,
            schedule_low_priority_values_first=scheduler.schedule_low_priority_values_first,
        )

    return [Hook(_TARGET, init_schedule_policy, ("self",))]


def _publishes() -> bool:
    """Tell whether this is the rank whose metrics count; all decide alike."""
    from sglang.srt.runtime_context import get_parallel

    return bool(get_parallel().tp_rank == 0 and get_parallel().pp_rank == 0)

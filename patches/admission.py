"""Who may start: refusals at the door, and the room of each owner when a batch is put together.

SGLang ends its admission loop at the first request that does not fit. Where a request does not fit
its *owner*, others must not wait for it: it is passed over and stays in the queue. After one of an
owner's requests was passed over, the later ones of that owner are too, so that a large request is
not starved by small ones; what runs ends, and then it fits.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

from sglang_ext.patches.hooks import Hook
from sglang_ext.patches.preemption import can_give_way, give_way, preempt
from sglang_ext.patches.scheduling import TenantScheduling, last_token
from sglang_ext.tenancy.identity import tenant_of_id
from sglang_ext.types import Owner

__all__ = ["Refusal", "TenantPrefillAdder", "admission_hooks", "refuse_outgrown"]

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_LONGEST_RETRY_S = 60


class Refusal(NamedTuple):
    """Why a request is not taken. ``retry_after`` in seconds, 0: never."""

    reason: str
    status: HTTPStatus
    message: str
    retry_after: int = 0


class TenantPrefillAdder(PrefillAdder):
    """One pass of admissions; SGLang makes a new one for each."""

    def __init__(self, *args: Any, scheduling: TenantScheduling, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._scheduling = scheduling
        # The queue's tail under ``tenant-fair``: owners without room, as in the pass before.
        self._held = frozenset(scheduling.blocked)
        self._taken: Counter[Owner] = Counter()
        self._passed_over: set[Owner] = set()
        self._only_reserved = False
        self._continued: Any = None

    def add_chunked_req(self, req: Any) -> Any:
        """Go on with a long prompt, or let it wait again behind who is owed this step.

        Returns the request while it is unfinished and not waiting, else None, as in SGLang.
        """
        if self._must_give_way(req):
            give_way(self, self._scheduling, req)
            return None
        self._continued = req
        return super().add_chunked_req(req)

    def _must_give_way(self, req: Any) -> bool:
        """Tell whether the front of the queue is owed this step, and has room to take it."""
        scheduling, front = self._scheduling, self._scheduling.front
        if not scheduling.fair or front is None or self.running_batch.batch_is_full:
            return False
        first, ticket = scheduling.ticket(front), scheduling.ticket(req)
        if first.owner in self._held or not can_give_way(req, self.tree_cache):
            return False
        need = self.ceil_paged_tokens(last_token(front)) - first.cached
        return need < self.rem_total_tokens and scheduling.is_owed_a_step(
            first.tenant, ticket.tenant
        )

    def add_one_req(
        self, req: Any, has_chunked_req: bool, truncation_align_size: int | None
    ) -> Any:
        """Admit ``req``, or pass it over (CONTINUE), or end the pass (any other result)."""
        owner = self._scheduling.ticket(req).owner
        if owner in self._held:
            self._scheduling.skipped(req, "quota")
            return AddReqResult.OTHER
        if owner in self._passed_over:
            return AddReqResult.CONTINUE
        if self._is_anothers_turn(req):
            self._scheduling.skipped(req, "turn")
            return AddReqResult.OTHER
        result = self._try(req, owner, has_chunked_req, truncation_align_size)
        short = result is AddReqResult.NO_TOKEN and not self._is_in(req)
        if short and self._preempt(req, owner):
            result = self._try(req, owner, has_chunked_req, truncation_align_size)
        return self._booked(req, owner, result)

    def _try(
        self, req: Any, owner: Owner, has_chunked_req: bool, truncation_align_size: int | None
    ) -> Any:
        shortage = self._shortage(req, owner)
        if shortage is not None:
            return shortage
        with self.tree_cache.as_requester((owner,)):
            return super().add_one_req(req, has_chunked_req, truncation_align_size)

    def preempt_to_schedule(self, req: Any) -> bool:
        """Make a place in a full batch; SGLang asks when all places are taken."""
        if not self._scheduling.fair:
            return bool(super().preempt_to_schedule(req))
        return preempt(self, self._scheduling, req, 0)

    def _preempt(self, req: Any, owner: Owner) -> bool:
        """Make memory for ``req`` at the cost of running requests of lower classes."""
        if not (self._scheduling.fair and self._scheduling.has_classes):
            return False
        # Locked as it will be: its own cached pages are no room for it.
        with self._lock_node(req.last_node), self.tree_cache.as_requester((owner,)):
            missing = self._need(req) + self.page_size + 1 - int(self.rem_total_tokens)
        return preempt(self, self._scheduling, req, missing)

    def _is_in(self, req: Any) -> bool:
        return bool(self.can_run_list) and self.can_run_list[-1] is req

    def _is_anothers_turn(self, req: Any) -> bool:
        """Tell whether the batch holds a tenant that is owed this step, which ``req`` would slow.

        A tenant that comes back is a quantum behind: its tokens are not computed in one batch with
        the next prompts of a flood, which get the step after. Once begun, its prompt goes on alone
        for as long as it is behind at all.
        """
        scheduling = self._scheduling
        if not (scheduling.fair and self.can_run_list):
            return False
        tenant = scheduling.ticket(req).tenant
        goes_on = self._continued
        if goes_on is not None and scheduling.is_behind(scheduling.ticket(goes_on).tenant, tenant):
            return True
        others = {scheduling.ticket(other).tenant for other in self.can_run_list}
        return any(scheduling.is_owed_a_step(other, tenant) for other in others)

    def _shortage(self, req: Any, owner: Owner) -> Any:
        """Return the result for a request that finds no room to run to its last token, else None.

        Over its owner's hard quota it is passed over. Where the pool is short it ends the pass, as
        in SGLang, so that small requests do not starve a large one.
        """
        scheduling = self._scheduling
        if not scheduling.limited:
            return None
        need = self._need(req)
        # Locked as it will be: cached pages count against a quota only while they are in use.
        with self._lock_node(req.last_node):
            quota_left = scheduling.quota_left(owner) - self._taken[owner]
            room = scheduling.cache.headroom(owner) - self._taken.total()
        if need > quota_left:
            if scheduling.fair and not self._taken[owner]:
                scheduling.blocked[owner] = need
            return self._pass_over(req, owner, "quota")
        if self._only_reserved:
            reserved = scheduling.unused_reserve(owner) - self._taken[owner]
            return None if need <= reserved else self._pass_over(req, owner, "memory")
        return AddReqResult.NO_TOKEN if scheduling.reserves and need > room else None

    def _need(self, req: Any) -> int:
        return self.ceil_paged_tokens(last_token(req)) - int(req.prefix_len)

    def _pass_over(self, req: Any, owner: Owner, reason: str) -> Any:
        self._passed_over.add(owner)
        self._scheduling.skipped(req, reason)
        return AddReqResult.CONTINUE

    def _booked(self, req: Any, owner: Owner, result: Any) -> Any:
        """Book an admission; where memory is short, go on for those who have a reserve."""
        if self._is_in(req):
            self._taken[owner] += self._need(req)
            self._scheduling.admitted(req)
        elif result is AddReqResult.NO_TOKEN:
            self._pass_over(req, owner, "memory")
        if result is AddReqResult.NO_TOKEN and self._scheduling.has_reserve_waiting(owner):
            self._only_reserved = True
            return AddReqResult.CONTINUE
        return result

    def _select_prefill_admission(self, req: Any, **limits: Any) -> Any:
        admission = super()._select_prefill_admission(req, **limits)
        # SGLang follows one unfinished prompt; under our chunk limit one may be there already.
        second = limits.get("has_chunked_req") and getattr(admission, "is_chunked", False)
        return AddReqResult.OTHER if second else admission


def admission_hooks(scheduling: TenantScheduling) -> list[Hook]:
    """Return the hooks at the door and at the making of a batch."""

    def init_req_max_new_tokens(original: Callable[..., None], scheduler: Any, req: Any) -> None:
        open_ended = req.sampling_params.max_new_tokens is None
        original(scheduler, req)
        if open_ended and scheduling.limited:
            _cap_output(scheduling, req)

    def abort_on_queued_limit(original: Callable[..., bool], scheduler: Any, recv_req: Any) -> bool:
        if original(scheduler, recv_req):
            return True
        refusal = _refusal(scheduling, scheduler, recv_req)
        if refusal is None:
            scheduling.arrived(recv_req, scheduler.waiting_queue)
            return False
        _refuse(scheduling, scheduler, recv_req, refusal)
        return True

    def get_prefill_adder_class(original: Callable[..., Any], scheduler: Any) -> Any:
        return partial(TenantPrefillAdder, scheduling=scheduling)

    return [
        Hook(f"{_SCHEDULER}.init_req_max_new_tokens", init_req_max_new_tokens, ("self", "req")),
        Hook(f"{_SCHEDULER}._abort_on_queued_limit", abort_on_queued_limit, ("self", "recv_req")),
        Hook(f"{_SCHEDULER}.get_prefill_adder_class", get_prefill_adder_class, ("self",)),
    ]


def refuse_outgrown(scheduling: TenantScheduling, scheduler: Any) -> int:
    """Refuse what waits and can never be admitted under limits that have just changed.

    It would wait for ever, and might keep others waiting. Returns how many were refused.
    """
    if not scheduling.limited:
        return 0
    refused = []
    for req in scheduler.waiting_queue:
        message = _never_fits(scheduling, req, last_token(req))
        if message is not None:
            refused.append((req, Refusal("too_large", HTTPStatus.BAD_REQUEST, message)))
    gone = {id(req) for req, _ in refused}
    scheduler.waiting_queue[:] = [req for req in scheduler.waiting_queue if id(req) not in gone]
    for req, refusal in refused:
        scheduler._release_aborted_request(req)
        _refuse(scheduling, scheduler, req, refusal)
    return len(refused)


def _never_fits(scheduling: TenantScheduling, req: Any, tokens: int) -> str | None:
    """Return why a request that grows to ``tokens`` can never run, None when it can."""
    cache = scheduling.cache
    page: int = cache.page_size
    # A page more than it fills, as SGLang's budget asks for.
    needed = -(-tokens // page) * page + page
    message: str | None = cache.fits_ever(cache.owner_of(req), needed)
    return message


def _cap_output(scheduling: TenantScheduling, req: Any) -> None:
    """Shorten an answer that nobody asked to be long to what its owner may ever hold."""
    prompt, most = len(req.origin_input_ids), req.sampling_params.max_new_tokens
    fits = bisect_left(
        range(most + 1),
        True,
        key=lambda output: _never_fits(scheduling, req, prompt + output) is not None,
    )
    if 1 < fits <= most:
        req.sampling_params.max_new_tokens = fits - 1
        req.sampling_params.min_new_tokens = min(req.sampling_params.min_new_tokens, fits - 1)


def _refusal(scheduling: TenantScheduling, scheduler: Any, req: Any) -> Refusal | None:
    """Return why ``req`` is not taken into the queue; one that was in it before always is."""
    if req.retracted_stain:
        return None
    if req.to_finish is not None and req.session is None:
        # SGLang found it wrong, and would have it wait for its turn to say so.
        reason = req.to_finish
        return Refusal("invalid", HTTPStatus(reason.status_code), reason.message)
    message = _never_fits(scheduling, req, last_token(req)) if scheduling.limited else None
    if message is not None:
        return Refusal("too_large", HTTPStatus.BAD_REQUEST, message)
    name = tenant_of_id(req.rid)
    if name not in scheduling.policy.tenants:
        # It was on its way while its tenant was removed; what it left would belong to nobody.
        return Refusal("removed", HTTPStatus.FORBIDDEN, "the tenant of this key was removed")
    tenant = scheduling.tenant(name)
    queued = scheduling.backlog.counts(scheduler.waiting_queue).get(tenant.name, 0)
    if queued < tenant.max_queued:
        return None
    text = f"{queued} requests of this tenant wait already, which is the most it may have waiting"
    wait = math.ceil(min(scheduling.last_wait.get(tenant.name, 0.0), _LONGEST_RETRY_S))
    return Refusal("queue_full", HTTPStatus.TOO_MANY_REQUESTS, text, max(1, wait))


def _refuse(scheduling: TenantScheduling, scheduler: Any, req: Any, refusal: Refusal) -> None:
    reason = {
        "type": "abort",
        "status_code": int(refusal.status),
        "message": refusal.message,
        "retry_after": refusal.retry_after,
    }
    req.time_stats.trace_ctx.abort(abort_info=reason)
    scheduler.send_abort_output(AbortReq(rid=req.rid, finished_reason=reason), req)
    if scheduling.metrics is not None:
        tenant = scheduling.tenant(tenant_of_id(req.rid))
        scheduling.metrics.refused(tenant.name, refusal.reason)

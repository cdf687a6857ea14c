"""Who gives way in a pass of admissions: long prompts to who is owed a step, low classes to high.

Both ways a request loses its place as when decoding runs out of memory: its KV is released, and it
waits again. What a prompt has computed stays cached and is its tenant's next request, so that it
goes on where it was.
"""

from collections.abc import Sequence
from typing import Any

from sglang.srt.managers.schedule_batch import release_req

from sglang_ext.patches.scheduling import TenantScheduling
from sglang_ext.tenancy.retraction import MOST_PREEMPTIONS, preemption_order
from sglang_ext.types import Owner, Tier

__all__ = ["can_give_way", "give_way", "preempt"]


def can_give_way(req: Any, cache: Any) -> bool:
    """Tell whether a prompt between two chunks can be taken up again without a loss.

    Not while SGLang still waits for its last chunk (overlap scheduling), nor where the cache does
    not hold everything that it has computed.
    """
    cached = len(cache.tree_components) == 1 and not (
        req.skip_radix_cache_insert or req.return_logprob or req.positional_embed_overrides
    )
    plain = req.session is None and req.beam_group is None
    waits = req.inflight_middle_chunks > 0
    return bool(cached and plain and not waits and req.retraction_count < MOST_PREEMPTIONS)


def give_way(adder: Any, scheduling: TenantScheduling, req: Any) -> None:
    """Put a prompt that is computed in part back into the queue, at the end of the pass."""
    cache = adder.tree_cache
    scheduling.preempted(req, "turn")
    release_req(
        req=req,
        remaing_req_count=0,
        req_to_token_pool=cache.req_to_token_pool,
        token_to_kv_pool_allocator=cache.token_to_kv_pool_allocator,
        tree_cache=cache,
        hisparse_coordinator=None,
    )
    adder.preempt_list.append(req)


def preempt(adder: Any, scheduling: TenantScheduling, req: Any, tokens: int) -> bool:
    """Retract running requests of lower classes until ``tokens`` more are free for ``req``.

    At least one; none when all that may give do not free enough. Tells whether any was retracted.
    O(running requests * owners).
    """
    batch = adder.running_batch
    rows = [row for row, other in enumerate(batch.reqs) if _may_be_preempted(other)]
    order = _order(adder, scheduling, req, [batch.reqs[row] for row in rows])
    chosen: list[int] = []
    for place in order:
        if chosen and tokens <= 0:
            break
        chosen.append(rows[place])
        tokens -= _gain(adder, batch.reqs[rows[place]])
    if not chosen or tokens > 0:
        return False
    _retract(adder, scheduling, sorted(chosen), scheduling.ticket(req).owner)
    return True


def _may_be_preempted(req: Any) -> bool:
    alive = not req.finished() and req.kv.holds_kv
    plain = req.beam_group is None and req.session is None
    return bool(alive and plain and req.retraction_count < MOST_PREEMPTIONS)


def _order(adder: Any, scheduling: TenantScheduling, req: Any, running: Sequence[Any]) -> list[int]:
    cache = adder.tree_cache
    requests = [(scheduling.ticket(one).owner, int(one.kv.kv_allocated_len)) for one in running]
    newcomer = scheduling.ticket(req).owner
    fixed = {owner: _fixed(cache, owner) for owner in {newcomer, *(who for who, _ in requests)}}
    capacity = cache.token_to_kv_pool_allocator.size
    return preemption_order(newcomer, requests, fixed, cache.limits, capacity)


def _gain(adder: Any, req: Any) -> int:
    """Return what SGLang's budget gains by a retraction, but for pages that others lock too."""
    still_to_come = adder._get_running_request_total_token_offset(req)
    return int(req.kv.kv_allocated_len + still_to_come)


def _retract(adder: Any, scheduling: TenantScheduling, rows: Sequence[int], owner: Owner) -> None:
    batch = adder.running_batch
    with adder.tree_cache.as_requester((owner,)):
        for row in rows:
            req = batch.reqs[row]
            adder.memory_budget.total_offset -= adder._get_running_request_total_token_offset(req)
            scheduling.preempted(req, "class")
            batch.release_req(row, 0)
            adder.preempt_list.append(req)
    kept = [row for row in range(len(batch.reqs)) if row not in set(rows)]
    batch.filter_batch(keep_indices=kept)


def _fixed(cache: Any, owner: Owner) -> int:
    usage = cache.ledger.usage(owner, Tier.HBM)
    return int(usage.protected + usage.running)

"""The way back up: from the disk into host memory while a request waits, from there into HBM.

arrival     prefetch_from_storage   worth it? then one side of the public boundary is asked for
landed      _handle_prefetch_result its pages are in host memory; the other side is asked for
admission   check_prefetch_progress waits no longer than computing would take
            init_load_back          worth it? then everything goes up, layer by layer
            finish_storage_prefetch_admission   what was of use

Every decision rests on numbers that all ranks agreed on, so that all ranks take the same.
"""

from array import array
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_ext.tiering.worth import Choice, LoadOrCompute
from sglang_ext.traffic import MeasuredCache
from sglang_ext.types import Tier

__all__ = ["LEAST_FETCH", "FetchingCache", "Outcome"]

LEAST_FETCH = 64
"""Tokens from which a fetch from the disk pays off, as long as nobody has measured it."""


class Outcome(StrEnum):
    """What became of tokens that a request asked the disk for."""

    ISSUED = "issued"
    """The disk has them; each of them comes to one of the other ends."""
    USEFUL = "useful"
    LATE = "late"
    """They were computed, since that was quicker than to wait on."""
    FAILED = "failed"
    """The disk could not give them after all."""
    NO_ROOM = "no_room"
    WASTED = "wasted"
    """The request did not take them: it had ended, or found them elsewhere by then."""


_OUTCOMES = {
    "deadline": Outcome.LATE,
    "storage_transfer": Outcome.FAILED,
    "host_capacity": Outcome.NO_ROOM,
    "device_capacity": Outcome.NO_ROOM,
}
"""By the reason that SGLang gives."""


@dataclass(slots=True)
class Fetch:
    """What one request fetches.

    ``asked`` tokens of the text are those of the present side of the boundary, of which the disk
    has ``due`` that have not come yet; ``rest`` tokens are those of the other side. ``landed``
    tokens came from the disk, the first of them at ``start``.
    """

    text: Any
    extra_key: str | None
    cache_salt: str | None
    asked: int = 0
    rest: int = 0
    due: int = 0
    landed: int = 0
    start: int | None = None


class FetchingCache(MeasuredCache):
    """SGLang's cache, which loads only what is quicker to load than to compute.

    ``fetched`` counts tokens by outcome, ``choices`` requests by tier and choice.
    """

    tree_core: Any

    def __init__(self, params: Any) -> None:
        self.worth = LoadOrCompute(LEAST_FETCH)
        self.fetched: Counter[Outcome] = Counter()
        self.choices: Counter[tuple[Tier, Choice]] = Counter()
        self._fetches: dict[Any, Fetch] = {}
        super().__init__(params)

    # ---- asking the disk

    def prefetch_from_storage(
        self,
        request: Any,
        last_host_node_id: int,
        new_input_tokens: Any,
        last_hash: str | None = None,
        prefix_keys: list[str] | None = None,
        matched_prefix_tokens: Any = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        storage_hit_end: int | None = None,
    ) -> bool | None:
        """Fetch what is worth it: the public side of the boundary, and once it landed, the other.

        The pages of the two sides are named by hash chains of their own, and the second hangs in
        the tree below the first.
        """
        if not self.enable_storage or request in self.ongoing_prefetch:
            return None
        key = RadixKey(new_input_tokens, extra_key, cache_salt=cache_salt)
        plan = self.tree_core.fetch_plan(last_host_node_id, key)
        if not self._is_worth_it(request, len(new_input_tokens)):
            return None
        if not self._copy_path_down(last_host_node_id):
            return None
        self.asks_below(new_input_tokens, plan)
        text = array("q", matched_prefix_tokens or ())
        text.extend(new_input_tokens)
        fetch = self._fetches.setdefault(request, Fetch(text, extra_key, cache_salt))
        fetch.asked, fetch.rest = plan.units, len(new_input_tokens) - plan.units
        decision: bool | None = super().prefetch_from_storage(
            request,
            last_host_node_id,
            new_input_tokens[: plan.units + int(self.tree_core.is_eagle)],
            plan.last_hash,
            prefix_keys,
            matched_prefix_tokens,
            plan.extra_key,
            plan.cache_salt,
            storage_hit_end,
        )
        return decision

    def query_storage_hit_length(
        self,
        last_host_node_id: int,
        new_input_tokens: Any,
        last_hash: str | None = None,
        prefix_keys: list[str] | None = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
    ) -> int:
        """Ask for the side of the boundary that ``prefetch_from_storage`` would fetch first."""
        key = RadixKey(new_input_tokens, extra_key, cache_salt=cache_salt)
        plan = self.tree_core.fetch_plan(last_host_node_id, key)
        self.asks_below(new_input_tokens, plan)
        found: int = super().query_storage_hit_length(
            last_host_node_id,
            new_input_tokens[: plan.units + int(self.tree_core.is_eagle)],
            plan.last_hash,
            prefix_keys,
            plan.extra_key,
            plan.cache_salt,
        )
        return found

    def asks_below(self, tokens: Any, plan: Any) -> None:
        """Called before the lower tiers are asked for the first ``plan.units`` of ``tokens``."""

    def is_backuped(self, node_id: int) -> bool:
        """Tell whether the disk may continue a node, which SGLang asks before it fetches.

        A node in HBM counts: ``prefetch_from_storage`` copies it down again where its copy had to
        make room.
        """
        return super().is_backuped(node_id) or Tier.HBM in self.tree_core.node_by_id(node_id).tiers

    def _copy_path_down(self, node_id: int) -> bool:
        """Begin the copies that a path in HBM lacks; tell whether its end has one now."""
        if not (self.is_root(node_id) or super().is_backuped(node_id)):
            self._execute_and_commit_kv_backup(self.tree_core.build_backup_kv_action(node_id))
        return self.is_root(node_id) or super().is_backuped(node_id)

    def _is_worth_it(self, request: Any, missing: int) -> bool:
        """Choose for a request's first fetch; what it began it goes on with."""
        if missing < self.page_size or request in self._fetches:
            return missing >= self.page_size
        choice = self.worth.choose(Tier.NVME, missing)
        if choice is Choice.RECOMPUTE:
            self.choices[Tier.NVME, choice] += 1
        return choice is Choice.LOAD

    # ---- what the disk gave

    def _handle_prefetch_result(self, operation: Any) -> None:
        request, came = operation.handle, operation.completed_tokens
        read_seconds = getattr(operation, "read_seconds", None)
        if came and read_seconds is not None:
            # Not what it waited for the scheduler: that passes while others are computed.
            self.worth.loaded(Tier.NVME, came, read_seconds)
        super()._handle_prefetch_result(operation)
        self._note_ready(operation)
        fetch = self._fetches.get(request)
        if fetch is None:
            return
        loaded, start = super().pop_prefetch_loaded_span(request)
        fetch.landed += loaded
        fetch.due -= loaded
        fetch.start = start if fetch.start is None else fetch.start
        if fetch.rest > 0 and came == fetch.asked and not operation.is_terminated():
            self._fetch_other_side(request, fetch)

    def _fetch_other_side(self, request: Any, fetch: Fetch) -> None:
        """Go on behind the public run, which is in host memory by now."""
        key = RadixKey(fetch.text, fetch.extra_key, cache_salt=fetch.cache_salt)
        found = self.match_prefix(MatchPrefixParams(key=key))
        there = found.device_prefix_len + found.host_hit_length
        self.prefetch_from_storage(
            request,
            found.last_host_node,
            fetch.text[there:],
            self.get_last_hash_value(found.last_host_node),
            None,
            fetch.text[:there],
            fetch.extra_key,
            fetch.cache_salt,
        )

    def pop_prefetch_loaded_span(self, request: Any) -> tuple[int, int | None]:
        """Return how many tokens came from the disk for a request, and where they start."""
        fetch = self._fetches.get(request)
        if fetch is None:
            # Of a pipeline only the first stage asks.
            span: tuple[int, int | None] = super().pop_prefetch_loaded_span(request)
            return span
        return fetch.landed, fetch.start

    # ---- how long to wait

    def _start_storage_prefetch_wait(self, operation: Any) -> None:
        """Wait for the disk no longer than computing would take."""
        began = operation.handle not in self._storage_prefetch_wait
        super()._start_storage_prefetch_wait(operation)
        patience = self.worth.patience(operation.stats_requested_tokens)
        if began and patience is not None and operation.handle in self._storage_prefetch_wait:
            self._storage_prefetch_wait[operation.handle].timeout_s = patience

    def _mark_prefetch_deadline_expired(self, operation: Any) -> None:
        super()._mark_prefetch_deadline_expired(operation)
        # It takes longer than was waited; how much longer, nobody will know.
        waited = self._storage_prefetch_wait[operation.handle].timeout_s
        if waited:
            self.worth.loaded(Tier.NVME, operation.stats_requested_tokens, 2 * waited)

    # ---- from host memory into HBM

    def init_load_back(self, params: Any) -> tuple[int, int] | None:
        tokens = params.host_hit_length
        if tokens > 0 and len(self.tree_components) == 1:
            choice = self.worth.choose(Tier.CPU, tokens)
            self.choices[Tier.CPU, choice] += 1
            if choice is Choice.RECOMPUTE:
                return 0, params.req.last_node
        loaded: tuple[int, int] | None = super().init_load_back(params)
        return loaded

    def loaded_back(self, tokens: int, seconds: float) -> None:
        self.worth.loaded(Tier.CPU, tokens, seconds)

    # ---- accounts: SGLang keeps the same, but only while its own metrics are on

    def _record_storage_prefetch_hit(self, request: Any, num_tokens: int) -> None:
        fetch = self._fetches.get(request)
        if fetch is not None and num_tokens > 0:
            if not fetch.due:
                self.choices[Tier.NVME, Choice.LOAD] += 1
            fetch.due += num_tokens
            self.fetched[Outcome.ISSUED] += num_tokens
        # SGLang knows one fetch of a request; what the public side found belongs to it too.
        remaining = self._storage_prefetch_hit_remaining_by_reqid
        earlier = remaining.pop(request, 0)
        super()._record_storage_prefetch_hit(request, num_tokens)
        if earlier:
            remaining[request] = remaining.get(request, 0) + earlier

    def _resolve_storage_prefetch_tokens(
        self, request: Any, num_tokens: int, reason: str | None = None
    ) -> None:
        self._settle(request, num_tokens, _OUTCOMES.get(reason or "", Outcome.WASTED))
        super()._resolve_storage_prefetch_tokens(request, num_tokens, reason)

    def _finish_storage_prefetch(
        self, request: Any, fulfilled_tokens: int, reason: str | None
    ) -> None:
        self._settle(request, None, _OUTCOMES.get(reason or "", Outcome.WASTED))
        super()._finish_storage_prefetch(request, fulfilled_tokens, reason)

    def finish_storage_prefetch_admission(
        self, request: Any, fulfilled_tokens: int, reason: str | None
    ) -> None:
        super().finish_storage_prefetch_admission(request, fulfilled_tokens, reason)
        self._close(request, fulfilled_tokens, _OUTCOMES.get(reason or "", Outcome.WASTED))

    def release_aborted_request(self, request: Any) -> None:
        super().release_aborted_request(request)
        self._close(request, 0, Outcome.WASTED)

    def _close(self, request: Any, useful: int, else_: Outcome) -> None:
        """Count what became of the tokens that landed for a request, and forget it."""
        self._settle(request, None, else_)
        fetch = self._fetches.pop(request, None)
        if fetch is not None:
            useful = min(useful, fetch.landed)
            self.fetched[Outcome.USEFUL] += useful
            self.fetched[else_] += fetch.landed - useful

    def _settle(self, request: Any, tokens: int | None, outcome: Outcome) -> None:
        """Count what became of so many tokens that the disk owes a request; None: of all."""
        fetch = self._fetches.get(request)
        if fetch is None:
            return
        settled = fetch.due if tokens is None else min(tokens, fetch.due)
        fetch.due -= settled
        self.fetched[outcome] += settled

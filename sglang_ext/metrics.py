"""Records requests and holdings by tenant, with labels that have a bounded number of values.

The metrics themselves are defined in ``observe.catalog``. prometheus_client decides at import
whether it works over several processes, so a metric is made at its first use.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from sglang_ext.observe.catalog import make
from sglang_ext.types import Owner, TenantId, Tier

__all__ = [
    "OTHER",
    "FinishedObserver",
    "FinishedRequest",
    "HeldMetrics",
    "RequestMetrics",
    "TenantLabels",
    "by_tier",
]

OTHER = "other"
"""Label of the tenants beyond the policy's ``metrics.tenants``."""

COMPUTED = "computed"
"""Where the KV of a prompt token came from when from no tier."""

_FIRST_TRY = 64
_SOURCES = {"device": Tier.HBM, "host": Tier.CPU, "storage": Tier.NVME}
_HISTOGRAMS = ("time_to_first_token_seconds", "request_duration_seconds")
_OUTCOMES = ("ok", "aborted", "rejected", "cancelled", "failed")


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """What one request used, in tokens, and how long it took, in seconds.

    ``cached`` is by tier; it and ``computed`` add up to the prompt. ``may_hit``: it was allowed to
    read the cache. ``first_token`` is None where no token came.
    """

    tenant: str
    prompt: int
    output: int
    cached: Mapping[str, int]
    seconds: float
    may_hit: bool = True
    first_token: float | None = None

    @property
    def hits(self) -> int:
        """Prompt tokens that came from a tier."""
        return sum(self.cached.values())

    @property
    def computed(self) -> int:
        """Prompt tokens that came from no tier."""
        return self.prompt - self.hits

    def eligible(self, page_size: int) -> int:
        """Return the prompt tokens that could have come from the cache, at least ``hits``."""
        most = page_size * ((self.prompt - 1) // page_size) if self.may_hit else 0
        return max(most, self.hits)


class FinishedObserver(Protocol):
    """Takes in every finished request; see ``observe.usage`` and ``observe.slow``."""

    def finished(self, request: FinishedRequest) -> None: ...


def by_tier(cached_tokens: int, sources: Mapping[str, int]) -> dict[str, int]:
    """Return cached tokens by tier from what SGLang says by source (device, host, storage).

    The sum is ``cached_tokens``, which is what the client was told: a token that no source claims
    came from HBM, and none counts twice.
    """
    left = cached_tokens
    tiers: dict[str, int] = {}
    for source in ("storage", "host"):
        tokens = min(max(sources.get(source) or 0, 0), left)
        left -= tokens
        if tokens:
            tiers[_SOURCES[source].value] = tokens
    return {Tier.HBM.value: left, **tiers} if left or not tiers else tiers


class TenantLabels:
    """Gives a label of its own to the ``limit`` largest tenants, ``other`` to the rest.

    The first that come get a label at once. One without a label that has grown to twice the size
    of the least with one takes over from it, until ``2 * limit`` labels have been given in all: no
    more series than that ever exist, and each only grows. Thread-safe.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._named: set[str] = set()
        self._given: set[str] = set()
        self._size: Counter[str] = Counter()
        self._next_try: dict[str, float] = {}
        self._lock = threading.Lock()

    def of(self, name: str, weight: float = 1) -> str:
        """Return the label of a tenant or owner that has grown by ``weight``. Amortised O(1)."""
        with self._lock:
            self._size[name] += weight  # type: ignore[assignment]
            if name in self._named or self._may_take(name):
                return name
        return OTHER

    def _may_take(self, name: str) -> bool:
        if len(self._named) < self._limit:
            self._give(name)
            return True
        size = self._size[name]
        room = name in self._given or len(self._given) < 2 * self._limit
        if not room or size < self._next_try.get(name, _FIRST_TRY):
            return False
        least = min(self._named, key=self._size.__getitem__)
        if size < 2 * self._size[least]:
            self._next_try[name] = 2 * size
            return False
        self._named.remove(least)
        self._give(name)
        return True

    def _give(self, name: str) -> None:
        self._named.add(name)
        self._given.add(name)


class RequestMetrics:
    """Counts requests, tokens and latencies by tenant, in the process that serves HTTP."""

    def __init__(self, tenant_limit: int, tenants: Sequence[str] = ()) -> None:
        """``tenants`` have their series from the first request on, whosever it is."""
        self.page_size = 1
        """Tokens a page; set once the engine's flags are known."""
        self.observers: list[FinishedObserver] = []
        self._labels = TenantLabels(tenant_limit)
        self._tenants = tenants[:tenant_limit]
        self._made: dict[str, Any] = {}
        self._begun = False

    @contextmanager
    def request(self, tenant: TenantId) -> Iterator[Callable[[Any], None]]:
        """Open one request; call the value with each of its outputs.

        Its outcome is ``ok``, ``aborted`` (the engine ended it), ``rejected`` (ValueError),
        ``cancelled`` (the client left) or ``failed``.
        """
        self._begin()
        outcome = "cancelled"

        def observe(output: Any) -> None:
            nonlocal outcome
            if outcome != "aborted":
                outcome = _outcome(output) or outcome

        try:
            yield observe
        except ValueError:
            outcome = "rejected"
            raise
        except Exception:
            outcome = "failed"
            raise
        finally:
            self._metric("requests_total").labels(self._labels.of(tenant), outcome).inc()

    def refused(self, status: int) -> None:
        """Count a request that carried no valid key for its route."""
        self._metric("refused_requests_total").labels(str(status)).inc()

    def audit_line_lost(self) -> None:
        """Count a line that could not be written into the audit log."""
        self._metric("audit_write_errors_total").inc()

    def first_token(self, tenant: str, seconds: float) -> None:
        """Record the time from arrival to the first token."""
        metric = self._metric("time_to_first_token_seconds")
        metric.labels(self._labels.of(tenant, 0)).observe(seconds)

    def finished(self, request: FinishedRequest) -> None:
        """Record a finished request, here and with every observer."""
        label = self._labels.of(request.tenant, 0)
        prompt = self._metric("prompt_tokens_total")
        for tier, tokens in request.cached.items():
            prompt.labels(label, tier).inc(tokens)
        prompt.labels(label, COMPUTED).inc(request.computed)
        self._metric("eligible_tokens_total").labels(label).inc(request.eligible(self.page_size))
        self._metric("generated_tokens_total").labels(label).inc(request.output)
        self._metric("request_duration_seconds").labels(label).observe(request.seconds)
        for observer in self.observers:
            observer.finished(request)

    def _metric(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = make(name)
        return self._made[name]

    def _begin(self) -> None:
        """Give the known tenants their series at 0: Prometheus sees no first increment of a series
        that begins with it."""
        begun, self._begun = self._begun, True
        if begun:
            return
        for label in map(self._labels.of, self._tenants):
            for outcome in _OUTCOMES:
                self._metric("requests_total").labels(label, outcome)
            for source in (Tier.HBM, Tier.CPU, Tier.NVME, COMPUTED):
                self._metric("prompt_tokens_total").labels(label, str(source))
            for name in ("eligible_tokens_total", "generated_tokens_total", *_HISTOGRAMS):
                self._metric(name).labels(label)


class HeldMetrics:
    """Publishes what each owner holds in each tier, from the process with the tree.

    Only the first rank of a tensor-parallel group publishes: its ranks hold the same tree.
    """

    def __init__(self, owner_limit: int, name: str = "held_tokens") -> None:
        self._labels = TenantLabels(owner_limit)
        self._published: set[tuple[str, str]] = set()
        self._gauge = make(name)

    def publish(self, held: Mapping[tuple[Owner, Tier], int]) -> None:
        """Set the gauges to ``held``; owners without a label of their own are summed."""
        sums = dict.fromkeys(self._published, 0)
        for (owner, tier), amount in held.items():
            key = (self._labels.of(owner or "public", amount), tier.value)
            sums[key] = sums.get(key, 0) + amount
        self._published |= sums.keys()
        for (label, tier_label), amount in sums.items():
            self._gauge.labels(label, tier_label).set(amount)


def _outcome(output: Any) -> str | None:
    """Return the outcome once every part of ``output`` has finished, else None."""
    parts = output if isinstance(output, list) else [output]
    reasons = [part.get("meta_info", {}).get("finish_reason") for part in parts]
    if not reasons or any(reason is None for reason in reasons):
        # An embedding has no finish reason; it comes whole.
        return "ok" if all("embedding" in part for part in parts) else None
    aborted = any(isinstance(reason, dict) and reason["type"] == "abort" for reason in reasons)
    return "aborted" if aborted else "ok"

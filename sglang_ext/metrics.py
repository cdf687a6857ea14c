"""Every ``sglang_ext_*`` metric. Base units; labels with a bounded number of values.

prometheus_client decides at import whether it works over several processes, so it is imported only
after SGLang has set the folder for that: in the constructors.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sglang_ext.types import Owner, TenantId, Tier

__all__ = ["OTHER", "HeldMetrics", "RequestMetrics", "TenantLabels"]

OTHER = "other"
"""Label of the tenants beyond the policy's ``metrics.tenants``."""

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 5, 8, 15, 30, 60, 120)
_SOURCES = {"device": Tier.HBM, "host": Tier.CPU, "storage": Tier.NVME}


class TenantLabels:
    """Gives a label of its own to the first ``limit`` tenants, ``other`` to the rest.

    A tenant keeps its label for the life of the process, so that every series only grows.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._named: set[str] = set()
        self._lock = threading.Lock()

    def of(self, name: str) -> str:
        """Return the label of a tenant or owner, in O(1)."""
        if name in self._named:
            return name
        with self._lock:
            if len(self._named) >= self._limit:
                return OTHER
            self._named.add(name)
        return name


class RequestMetrics:
    """Counts requests, tokens and latencies by tenant, in the process that serves HTTP."""

    def __init__(self, tenant_limit: int) -> None:
        self._labels = TenantLabels(tenant_limit)

    @contextmanager
    def request(self, tenant: TenantId) -> Iterator[Callable[[Any], None]]:
        """Open one request; call the value with each of its outputs.

        Its outcome is ``ok``, ``aborted`` (the engine ended it), ``rejected`` (ValueError),
        ``cancelled`` (the client left) or ``failed``.
        """
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
            self._requests.labels(self._labels.of(tenant), outcome).inc()

    def refused(self, status: int) -> None:
        """Count a request that carried no valid key for its route."""
        self._refusals.labels(str(status)).inc()

    def first_token(self, tenant: str, seconds: float) -> None:
        """Record the time from arrival to the first token."""
        self._ttft.labels(self._labels.of(tenant)).observe(seconds)

    def finished(
        self,
        tenant: str,
        *,
        prompt_tokens: int,
        generation_tokens: int,
        cached: Mapping[str, int],
        seconds: float,
    ) -> None:
        """Record a finished request; ``cached`` is by SGLang's source (device, host, storage)."""
        label = self._labels.of(tenant)
        for source, tokens in cached.items():
            self._prompt.labels(label, _SOURCES.get(source, source)).inc(tokens)
        computed = max(prompt_tokens - sum(cached.values()), 0)
        self._prompt.labels(label, "computed").inc(computed)
        self._generated.labels(label).inc(generation_tokens)
        self._duration.labels(label).observe(seconds)

    @functools.cached_property
    def _requests(self) -> Any:
        return _counter("requests", "Requests by outcome.", "tenant", "outcome")

    @functools.cached_property
    def _refusals(self) -> Any:
        return _counter("refused_requests", "Requests without a valid key.", "status")

    @functools.cached_property
    def _prompt(self) -> Any:
        text = "Prompt tokens by where their KV came from: computed, hbm, cpu or nvme."
        return _counter("prompt_tokens", text, "tenant", "source")

    @functools.cached_property
    def _generated(self) -> Any:
        return _counter("generated_tokens", "Tokens generated.", "tenant")

    @functools.cached_property
    def _ttft(self) -> Any:
        return _histogram("time_to_first_token_seconds", "Arrival to first token.")

    @functools.cached_property
    def _duration(self) -> Any:
        return _histogram("request_duration_seconds", "Arrival to last token.")


class HeldMetrics:
    """Publishes how many tokens each owner holds in each tier, from the process with the tree.

    Only the first rank of a tensor-parallel group publishes: its ranks hold the same tree.
    """

    def __init__(self, owner_limit: int) -> None:
        from prometheus_client import Gauge

        self._labels = TenantLabels(owner_limit)
        self._published: set[tuple[str, str]] = set()
        self._gauge = Gauge(
            "sglang_ext_held_tokens",
            "Tokens held by owner and tier.",
            labelnames=("owner", "tier"),
            multiprocess_mode="livesum",
        )

    def publish(self, held: Mapping[tuple[Owner, Tier], int]) -> None:
        """Set the gauges to ``held``; owners without a label of their own are summed."""
        sums = dict.fromkeys(self._published, 0)
        for (owner, tier), tokens in held.items():
            key = (self._labels.of(owner or "public"), tier.value)
            sums[key] = sums.get(key, 0) + tokens
        self._published |= sums.keys()
        for (label, tier_label), tokens in sums.items():
            self._gauge.labels(label, tier_label).set(tokens)


def _outcome(output: Any) -> str | None:
    """Return the outcome once every part of ``output`` has finished, else None."""
    parts = output if isinstance(output, list) else [output]
    reasons = [part.get("meta_info", {}).get("finish_reason") for part in parts]
    if not reasons or any(reason is None for reason in reasons):
        # An embedding has no finish reason; it comes whole.
        return "ok" if all("embedding" in part for part in parts) else None
    aborted = any(isinstance(reason, dict) and reason["type"] == "abort" for reason in reasons)
    return "aborted" if aborted else "ok"


def _counter(name: str, text: str, *labels: str) -> Any:
    from prometheus_client import Counter

    return Counter(f"sglang_ext_{name}_total", text, labelnames=labels)


def _histogram(name: str, text: str) -> Any:
    from prometheus_client import Histogram

    return Histogram(f"sglang_ext_{name}", text, labelnames=("tenant",), buckets=_SECONDS)

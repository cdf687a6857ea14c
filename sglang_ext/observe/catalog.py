"""Every ``sglang_ext_*`` metric, in one table: name, kind, labels, meaning with its unit.

Base units only (seconds, tokens, bytes); a counter ends in ``_total``. ``docs/metrics.md`` holds
this table (``python -m sglang_ext.observe.catalog`` prints it), and nobody else makes a metric.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

__all__ = ["METRICS", "PREFIX", "Kind", "Metric", "make", "table"]

PREFIX = "sglang_ext_"

LATENCY_SECONDS = (
    *(0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75),
    *(1, 1.5, 2, 3, 5, 8, 15, 30, 60, 120),
)
QUEUE_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Kind(StrEnum):
    """What Prometheus calls the type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. ``name`` is without PREFIX, ``text`` states the unit."""

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        """The name on ``/metrics``."""
        return PREFIX + self.name


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(f"{name}_total", Kind.COUNTER, text, labels)


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, Kind.GAUGE, text, labels)


def _histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    return Metric(name, Kind.HISTOGRAM, text, labels, buckets)


_ALL = (
    # The process that serves HTTP.
    _counter(
        "requests",
        "Requests, by outcome: ok, aborted, rejected, cancelled or failed.",
        "tenant",
        "outcome",
    ),
    _counter("refused_requests", "Requests without a valid key for their route.", "status"),
    _counter(
        "prompt_tokens",
        "Prompt tokens, by where their KV came from: computed, hbm, cpu or nvme.",
        "tenant",
        "source",
    ),
    _counter(
        "eligible_tokens",
        "Prompt tokens that could have come from the cache: whole pages, without the last token "
        "of each prompt, of requests that may read the cache. Never less than those that did.",
        "tenant",
    ),
    _counter("generated_tokens", "Tokens generated.", "tenant"),
    _histogram(
        "time_to_first_token_seconds",
        "Seconds from arrival to the first token.",
        LATENCY_SECONDS,
        "tenant",
    ),
    _histogram(
        "request_duration_seconds",
        "Seconds from arrival to the last token.",
        LATENCY_SECONDS,
        "tenant",
    ),
    _counter(
        "usage_write_errors",
        "Failed writes of the usage file; what was not written is kept and tried again.",
    ),
    _counter(
        "audit_write_errors", "Lines that the audit log did not take; the server's log has them."
    ),
    # The gateway in front of several engines.
    _gauge("ready_engines", "Engines that serve now: 1 or 0.", "engine"),
    _counter("engine_restarts", "How often an engine ended and was started again.", "engine"),
    _counter(
        "gateway_failures",
        "Requests without an engine's answer, by reason: unreachable (nothing was sent) or broken "
        "(the engine ended while it worked on one).",
        "engine",
        "reason",
    ),
    # The scheduler.
    _histogram(
        "queue_time_seconds",
        "Seconds from arrival in the scheduler to the first admission.",
        QUEUE_SECONDS,
        "tenant",
    ),
    _counter(
        "admissions_skipped",
        "Admission passes that passed over a waiting request, by reason: quota, memory or turn.",
        "tenant",
        "reason",
    ),
    _counter(
        "admissions_refused",
        "Requests refused by the scheduler, by reason: too_large, queue_full or invalid.",
        "tenant",
        "reason",
    ),
    _counter(
        "preemptions",
        "Requests that had begun and wait again, by reason: turn (a long prompt gave way between "
        "two chunks) or class (memory or a place for a higher service class).",
        "tenant",
        "reason",
    ),
    _gauge("queued_requests", "Requests that wait now.", "tenant"),
    _gauge(
        "deficit_tokens",
        "Weighted tokens that a waiting tenant lacks to its fair share now.",
        "tenant",
    ),
    _counter(
        "recomputed_tokens",
        "Prompt tokens in whole pages computed again although this namespace had computed them "
        "before, among the last million pages since the start of the server.",
        "tenant",
    ),
    _gauge("held_tokens", "Tokens held now, running requests included.", "owner", "tier"),
    _gauge("held_bytes", "Bytes held now by all ranks, in whole tokens.", "owner", "tier"),
    _counter(
        "token_seconds",
        "Tokens times the seconds that they were held, from which a bill is made. Exact for hbm "
        "and cpu, from one look a second for nvme.",
        "owner",
        "tier",
    ),
    _gauge("quota_tokens", "Ceiling of an owner in tokens.", "owner", "tier"),
    _gauge("reserve_tokens", "Floor of an owner in tokens.", "owner", "tier"),
    _gauge("tier_capacity_tokens", "Tokens that a tier can hold.", "tier"),
    _counter(
        "evicted_tokens",
        "Tokens that left a tier, by reason: quota, pressure, ttl or flush.",
        "owner",
        "tier",
        "reason",
    ),
    _counter("moved_bytes", "Bytes that one rank moved between two tiers.", "from", "to"),
    _counter(
        "moved_seconds",
        "Seconds that these moves took. They overlap with computing, and with each other.",
        "from",
        "to",
    ),
    _counter(
        "fetched_tokens",
        "Tokens that requests asked the NVMe tier for and that it had (issued), and what became "
        "of them: useful, late (computed: quicker than to wait on), failed, no_room or wasted.",
        "outcome",
    ),
    _histogram(
        "fetch_ready_seconds",
        "Seconds from the delivery of pages by the disk to the moment a request may use them.",
        QUEUE_SECONDS,
    ),
    _counter(
        "load_choices",
        "Requests for which text that a tier holds was loaded, or recomputed since that is quicker "
        "by what was measured; of nvme, recompute also counts text that may not be there.",
        "tier",
        "outcome",
    ),
    _counter(
        "store_events",
        "What happened to pages in the NVMe tier: hit, miss, stored, evicted and each reason of "
        "loss.",
        "event",
    ),
    _counter("store_bytes", "Bytes of the pages that were a hit, or stored.", "event"),
)

METRICS = {metric.name: metric for metric in _ALL}
"""By name without PREFIX."""


def make(name: str) -> Any:
    """Return a new prometheus_client metric for the entry called ``name`` (without PREFIX).

    prometheus_client decides at import whether it works over several processes, so this must not
    be called before SGLang has set the folder for that.
    """
    from prometheus_client import Counter, Gauge, Histogram

    metric = METRICS[name]
    if metric.kind is Kind.COUNTER:
        return Counter(metric.full_name, metric.text, labelnames=metric.labels)
    if metric.kind is Kind.GAUGE:
        return Gauge(
            metric.full_name, metric.text, labelnames=metric.labels, multiprocess_mode="livesum"
        )
    return Histogram(
        metric.full_name, metric.text, labelnames=metric.labels, buckets=metric.buckets
    )


def table() -> str:
    """Return the reference as a Markdown table, one line a metric."""
    head = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    rows = [
        f"| `{metric.full_name}` | {metric.kind} | {', '.join(metric.labels) or '-'} "
        f"| {metric.text} |"
        for metric in METRICS.values()
    ]
    return "\n".join([*head, *rows])


if __name__ == "__main__":
    print(table())

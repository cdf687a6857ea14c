"""SGLang's own request metrics, split by tenant on the way.

SGLang takes a collector class by role (``ServerArgs.stat_loggers``). Ours takes the tenant out of
the labels, so that SGLang's series keep their number, and records it in ``sglang_ext_*``.
"""

from typing import Any

from sglang.srt.observability.metrics_collector import TokenizerMetricsCollector

from sglang_ext.active import request_metrics

__all__ = ["TenantTokenizerMetrics"]


class TenantTokenizerMetrics(TokenizerMetricsCollector):
    """Passes every observation on and records the tenant's share of it."""

    def observe_time_to_first_token(
        self, labels: dict[str, str], value: float, *, stream: bool
    ) -> None:
        """Record the first token of one request, ``value`` in seconds."""
        tenant, rest = _split(labels)
        request_metrics().first_token(tenant, value)
        super().observe_time_to_first_token(rest, value, stream=stream)

    def observe_inter_token_latency(
        self, labels: dict[str, str], internval: float, num_new_tokens: int
    ) -> None:
        """Record the seconds between two outputs of one request."""
        super().observe_inter_token_latency(_split(labels)[1], internval, num_new_tokens)

    def observe_one_finished_request(
        self,
        labels: dict[str, str],
        prompt_tokens: int,
        generation_tokens: int,
        cached_tokens: int,
        e2e_latency: float,
        has_grammar: bool,
        cached_tokens_details: dict[str, Any] | None = None,
        **rest: Any,
    ) -> None:
        """Record one finished request."""
        tenant, others = _split(labels)
        request_metrics().finished(
            tenant,
            prompt_tokens=prompt_tokens,
            generation_tokens=generation_tokens,
            cached=_by_source(cached_tokens, cached_tokens_details),
            seconds=e2e_latency,
        )
        super().observe_one_finished_request(
            others,
            prompt_tokens,
            generation_tokens,
            cached_tokens,
            e2e_latency,
            has_grammar,
            cached_tokens_details,
            **rest,
        )


def _split(labels: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Return the tenant and the labels without it."""
    rest = {name: value for name, value in labels.items() if name != "tenant"}
    return labels["tenant"], rest


def _by_source(cached_tokens: int, details: dict[str, Any] | None) -> dict[str, int]:
    """Return cached tokens by source; without a lower tier they all came from the device."""
    sources = {
        name: details[name]
        for name in ("device", "host", "storage")
        if details and details.get(name)
    }
    return sources or {"device": cached_tokens}

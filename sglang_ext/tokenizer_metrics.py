"""SGLang's own request metrics, split by tenant on the way.

SGLang takes a collector class by role (``ServerArgs.stat_loggers``). Ours takes the tenant out of
the labels, so that SGLang's series keep their number, and records it in ``sglang_ext_*``.
"""

from typing import Any

from sglang.srt.observability.metrics_collector import TokenizerMetricsCollector

from sglang_ext.active import request_metrics
from sglang_ext.metrics import FinishedRequest, by_tier
from sglang_ext.patches.tokenizer_manager import RequestFacts

__all__ = ["TenantTokenizerMetrics"]

_OURS = {"tenant", "facts"}


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
        facts: Any = labels.get("facts") or RequestFacts()
        request_metrics().finished(
            FinishedRequest(
                tenant=tenant,
                prompt=prompt_tokens,
                output=generation_tokens,
                cached=by_tier(cached_tokens, cached_tokens_details or {}),
                seconds=e2e_latency,
                may_hit=facts.may_hit,
                first_token=facts.first_token,
            )
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


def _split(labels: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """Return the tenant, and the labels without what only we put there."""
    rest = {name: value for name, value in labels.items() if name not in _OURS}
    return labels["tenant"], rest

"""Hook on the attributes of SGLang's OpenTelemetry spans: whose a request was, and which tiers gave
its tokens. Nothing runs unless tracing is on."""

from collections.abc import Callable, Mapping
from typing import Any

from sglang_ext.patches.hooks import Hook
from sglang_ext.tenancy.identity import tenant_of_id

__all__ = ["trace_hooks"]

_TARGET = "sglang.srt.managers.tokenizer_manager.TokenizerManager.convert_to_span_attrs"


def trace_hooks(by_tier: Callable[[int, Mapping[str, int]], Mapping[str, int]]) -> list[Hook]:
    """Return the hook; ``by_tier`` splits cached tokens by what SGLang says of their source."""

    def convert_to_span_attrs(
        original: Callable[..., dict[str, Any]], manager: Any, state: Any, recv_obj: Any, i: int
    ) -> dict[str, Any]:
        attributes = original(manager, state, recv_obj, i)
        if attributes:
            details = getattr(recv_obj, "cached_tokens_details", None)
            sources = (details[i] if details else None) or {}
            cached = by_tier(recv_obj.cached_tokens[i], sources)
            attributes["sglang_ext.tenant"] = tenant_of_id(recv_obj.rids[i])
            for tier, tokens in cached.items():
                attributes[f"sglang_ext.cached_tokens.{tier}"] = tokens
        return attributes

    return [Hook(_TARGET, convert_to_span_attrs, ("self", "state", "recv_obj", "i"))]

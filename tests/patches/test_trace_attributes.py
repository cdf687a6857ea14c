"""What the spans of a request say, with SGLang's own attributes beside ours."""

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sglang_ext.metrics import by_tier
from sglang_ext.patches.trace_attributes import trace_hooks


def _attributes(traced: bool, details: list[Any] | None) -> dict[str, Any]:
    (hook,) = trace_hooks(by_tier)
    manager = SimpleNamespace(enable_trace=traced, served_model_name="m")
    state = SimpleNamespace(obj=SimpleNamespace(rid="acme/1", sampling_params={}))
    received = SimpleNamespace(
        rids=["b/2", "acme/1"],
        prompt_tokens=[9, 100],
        completion_tokens=[1, 5],
        cached_tokens=[0, 48],
        finished_reasons=[None, {"type": "stop"}],
        cached_tokens_details=details,
    )
    original = TokenizerManager.convert_to_span_attrs
    found: dict[str, Any] = hook.function(original, manager, state, received, 1)
    return found


@pytest.mark.parametrize(
    ("details", "tiers"),
    [
        ([None, {"device": 16, "host": 32}], {"hbm": 16, "cpu": 32}),
        (None, {"hbm": 48}),
        ([None, None], {"hbm": 48}),
    ],
)
def test_a_span_says_whose_it_was_and_where_its_tokens_came_from(
    details: list[Any] | None, tiers: dict[str, int]
) -> None:
    found = _attributes(True, details)
    ours = {name: value for name, value in found.items() if name.startswith("sglang_ext.")}
    assert ours == {
        "sglang_ext.tenant": "acme",
        **{f"sglang_ext.cached_tokens.{tier}": tokens for tier, tokens in tiers.items()},
    }
    assert found["gen_ai.usage.prompt_tokens"] == 100


def test_without_tracing_nothing_is_made() -> None:
    assert _attributes(False, None) == {}

"""What each metric counts, on a registry of the test's own."""

import asyncio
import functools
import inspect
from collections.abc import AsyncGenerator, Callable
from typing import Any

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from sglang.srt.observability.metrics_collector import TokenizerMetricsCollector

from sglang_ext import tokenizer_metrics
from sglang_ext.metrics import OTHER, HeldMetrics, RequestMetrics, TenantLabels
from sglang_ext.tokenizer_metrics import TenantTokenizerMetrics
from sglang_ext.types import PUBLIC, Owner, TenantId, Tier

_A = TenantId("a")
_STOP = {"meta_info": {"finish_reason": {"type": "stop"}}}
_ABORT = {"meta_info": {"finish_reason": {"type": "abort"}}}
_GOING_ON = {"meta_info": {"finish_reason": None}}
_EMBEDDING = {"embedding": [0.1], "meta_info": {}}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> CollectorRegistry:
    """A registry that takes the place of the process's own."""
    fresh = CollectorRegistry()
    for name in ("Counter", "Gauge", "Histogram"):
        metric = functools.partial(getattr(prometheus_client, name), registry=fresh)
        monkeypatch.setattr(prometheus_client, name, metric)
    return fresh


def _outcomes(registry: CollectorRegistry) -> dict[str, float]:
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    named = [sample for sample in samples if sample.name == "sglang_ext_requests_total"]
    assert {sample.labels["tenant"] for sample in named} == {"a"}
    return {sample.labels["outcome"]: sample.value for sample in named}


@given(st.lists(st.sampled_from("abcdef"), max_size=20), st.integers(0, 4))
def test_labels_are_bounded_and_never_change(names: list[str], limit: int) -> None:
    labels = TenantLabels(limit)
    given_labels = [labels.of(name) for name in names]
    first = list(dict.fromkeys(names))[:limit]
    assert given_labels == [name if name in first else OTHER for name in names]
    assert [labels.of(name) for name in names] == given_labels


@pytest.mark.parametrize(
    ("outputs", "outcome"),
    [
        ([_STOP], "ok"),
        ([_GOING_ON, _GOING_ON, _STOP], "ok"),
        ([_ABORT], "aborted"),
        ([_GOING_ON, _ABORT], "aborted"),
        ([[_STOP, _STOP]], "ok"),
        ([[_STOP, _ABORT]], "aborted"),
        ([[_STOP, _GOING_ON]], "cancelled"),
        ([_ABORT, _STOP], "aborted"),
        ([_STOP, _ABORT], "aborted"),
        ([_EMBEDDING], "ok"),
        ([[_EMBEDDING, _EMBEDDING]], "ok"),
        ([_GOING_ON], "cancelled"),
        ([], "cancelled"),
        ([[]], "ok"),
    ],
    ids=str,
)
def test_outcome_by_what_the_engine_sent(
    registry: CollectorRegistry, outputs: list[Any], outcome: str
) -> None:
    with RequestMetrics(5).request(_A) as observe:
        for output in outputs:
            observe(output)
    assert _outcomes(registry) == {outcome: 1}


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ValueError, "rejected"),
        (RuntimeError, "failed"),
        (asyncio.CancelledError, "cancelled"),
        (GeneratorExit, "cancelled"),
    ],
)
@pytest.mark.parametrize("outputs", [[], [_GOING_ON]], ids=["early", "late"])
def test_outcome_by_how_the_request_ended(
    registry: CollectorRegistry, error: type[BaseException], outcome: str, outputs: list[Any]
) -> None:
    with pytest.raises(error), RequestMetrics(5).request(_A) as observe:
        for output in outputs:
            observe(output)
        raise error
    assert _outcomes(registry) == {outcome: 1}


async def _request(metrics: RequestMetrics, outputs: list[Any]) -> AsyncGenerator[Any, None]:
    with metrics.request(_A) as observe:
        for output in outputs:
            observe(output)
            yield output


@pytest.mark.parametrize(
    ("outputs", "outcome"), [([_GOING_ON, _STOP], "cancelled"), ([_STOP, _STOP], "ok")]
)
def test_a_generator_that_is_closed_early(
    registry: CollectorRegistry, outputs: list[Any], outcome: str
) -> None:
    """SGLang takes one whole answer and leaves; a client that left did not get one."""

    async def scenario() -> None:
        answers = _request(RequestMetrics(5), outputs)
        await anext(answers)
        await answers.aclose()

    asyncio.run(scenario())
    assert _outcomes(registry) == {outcome: 1}


def test_tokens_by_source(registry: CollectorRegistry) -> None:
    metrics = RequestMetrics(1)
    cached = {"device": 10, "host": 20, "storage": 30, "elsewhere": 5}
    metrics.finished("a", prompt_tokens=100, generation_tokens=7, cached=cached, seconds=0.3)
    metrics.finished("b", prompt_tokens=3, generation_tokens=1, cached={"device": 4}, seconds=0.3)
    found = {
        (sample.labels["tenant"], sample.labels["source"]): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "sglang_ext_prompt_tokens_total"
    }
    assert found == {
        ("a", "hbm"): 10,
        ("a", "cpu"): 20,
        ("a", "nvme"): 30,
        ("a", "elsewhere"): 5,
        ("a", "computed"): 35,
        ("other", "hbm"): 4,
        ("other", "computed"): 0,
    }
    generated = "sglang_ext_generated_tokens_total"
    assert registry.get_sample_value(generated, {"tenant": "a"}) == 7
    duration = "sglang_ext_request_duration_seconds_count"
    assert registry.get_sample_value(duration, {"tenant": "other"}) == 1


def test_refusals_and_first_tokens(registry: CollectorRegistry) -> None:
    metrics = RequestMetrics(5)
    for status in (401, 401, 403):
        metrics.refused(status)
    metrics.first_token("a", 0.5)
    refused = "sglang_ext_refused_requests_total"
    assert registry.get_sample_value(refused, {"status": "401"}) == 2
    first = "sglang_ext_time_to_first_token_seconds_sum"
    assert registry.get_sample_value(first, {"tenant": "a"}) == 0.5


def _held(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    return {
        (sample.labels["owner"], sample.labels["tier"]): sample.value
        for metric in registry.collect()
        for sample in metric.samples
    }


def test_held_tokens_of_unnamed_owners_are_summed(registry: CollectorRegistry) -> None:
    held = HeldMetrics(2)
    held.publish(
        {
            (PUBLIC, Tier.HBM): 1,
            (Owner("t:a"), Tier.HBM): 2,
            (Owner("t:a"), Tier.CPU): 3,
            (Owner("t:b"), Tier.HBM): 4,
            (Owner("t:c"), Tier.HBM): 5,
        }
    )
    named = {("public", "hbm"): 1, ("t:a", "hbm"): 2, ("t:a", "cpu"): 3}
    assert _held(registry) == named | {("other", "hbm"): 9}


def test_an_owner_that_holds_nothing_any_more_falls_to_zero(registry: CollectorRegistry) -> None:
    """The ledger forgets such an owner."""
    held = HeldMetrics(1)
    held.publish({(Owner("t:a"), Tier.HBM): 2, (Owner("t:b"), Tier.HBM): 4})
    held.publish({(Owner("t:b"), Tier.HBM): 3})
    assert _held(registry) == {("t:a", "hbm"): 0, ("other", "hbm"): 3}


@pytest.mark.parametrize(
    ("cached", "details", "sources"),
    [
        (5, None, {"device": 5}),
        (5, {}, {"device": 5}),
        (0, {"device": 0, "host": 0}, {"device": 0}),
        (5, {"device": 2, "host": 3, "storage": 0}, {"device": 2, "host": 3}),
        (5, {"storage": 5, "storage_backend": "file"}, {"storage": 5}),
    ],
)
def test_sources_of_cached_tokens(
    cached: int, details: dict[str, Any] | None, sources: dict[str, int]
) -> None:
    assert tokenizer_metrics._by_source(cached, details) == sources


def _parameters(function: Callable[..., Any]) -> list[str]:
    kept = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in kept if parameter.kind is not parameter.VAR_KEYWORD]


@pytest.mark.parametrize(
    "name",
    [
        "observe_time_to_first_token",
        "observe_inter_token_latency",
        "observe_one_finished_request",
    ],
)
def test_sglangs_collector_still_has_what_we_override(name: str) -> None:
    theirs = _parameters(getattr(TokenizerMetricsCollector, name))
    ours = _parameters(getattr(TenantTokenizerMetrics, name))
    assert theirs[: len(ours)] == ours

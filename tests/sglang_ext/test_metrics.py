"""What each metric counts, on a registry of the test's own."""

import asyncio
import inspect
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from sglang.srt.observability.metrics_collector import TokenizerMetricsCollector

from sglang_ext.metrics import (
    OTHER,
    FinishedRequest,
    HeldMetrics,
    RequestMetrics,
    TenantLabels,
    by_tier,
)
from sglang_ext.tokenizer_metrics import TenantTokenizerMetrics
from sglang_ext.types import PUBLIC, Owner, TenantId, Tier

_A = TenantId("a")
_STOP = {"meta_info": {"finish_reason": {"type": "stop"}}}
_ABORT = {"meta_info": {"finish_reason": {"type": "abort"}}}
_GOING_ON = {"meta_info": {"finish_reason": None}}
_EMBEDDING = {"embedding": [0.1], "meta_info": {}}


def _outcomes(registry: CollectorRegistry) -> dict[str, float]:
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    named = [sample for sample in samples if sample.name == "sglang_ext_requests_total"]
    assert {sample.labels["tenant"] for sample in named} == {"a"}
    return {sample.labels["outcome"]: sample.value for sample in named}


@given(st.lists(st.sampled_from("abcdefghij"), max_size=400), st.integers(0, 4))
def test_labels_are_bounded(names: list[str], limit: int) -> None:
    labels = TenantLabels(limit)
    given_labels = [labels.of(name, 10) for name in names]
    assert all(label in (name, OTHER) for name, label in zip(names, given_labels, strict=True))
    assert len(set(given_labels) - {OTHER}) <= 2 * limit


def test_a_tenant_that_grew_large_takes_the_label_of_the_least() -> None:
    labels = TenantLabels(2)
    for _ in range(100):
        assert labels.of("large") == "large"
    assert [labels.of("small") for _ in range(10)] == ["small"] * 10
    seen = [labels.of("late") for _ in range(70)]
    assert seen == [OTHER] * 63 + ["late"] * 7
    assert labels.of("small") == OTHER
    assert labels.of("large") == "large"


def test_no_more_than_twice_as_many_labels_are_ever_given() -> None:
    """Series can not be taken back."""
    labels = TenantLabels(3)
    seen = {labels.of(f"t{number}", 1000 * 3**number) for number in range(40)}
    assert len(seen - {OTHER}) == 6


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


async def _answers(metrics: RequestMetrics, outputs: list[Any]) -> AsyncGenerator[Any, None]:
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
        answers = _answers(RequestMetrics(5), outputs)
        await anext(answers)
        await answers.aclose()

    asyncio.run(scenario())
    assert _outcomes(registry) == {outcome: 1}


def _request(tenant: str, prompt: int, cached: dict[str, int], **fields: Any) -> FinishedRequest:
    return FinishedRequest(
        tenant=tenant, prompt=prompt, output=7, cached=cached, seconds=0.3, **fields
    )


def test_tokens_by_source(registry: CollectorRegistry) -> None:
    metrics = RequestMetrics(1)
    metrics.finished(_request("a", 100, {"hbm": 10, "cpu": 20, "nvme": 30}))
    metrics.finished(_request("b", 4, {"hbm": 4}))
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
        ("a", "computed"): 40,
        ("other", "hbm"): 4,
        ("other", "computed"): 0,
    }
    generated = "sglang_ext_generated_tokens_total"
    assert registry.get_sample_value(generated, {"tenant": "a"}) == 7
    duration = "sglang_ext_request_duration_seconds_count"
    assert registry.get_sample_value(duration, {"tenant": "other"}) == 1


@pytest.mark.trial(96)
@given(st.integers(1, 200), st.integers(0, 200), st.booleans(), st.sampled_from([1, 16]))
def test_trial_96_hits_are_never_above_what_could_hit(
    prompt: int, hits: int, may_hit: bool, page_size: int
) -> None:
    hits = min(hits, prompt)
    request = _request("a", prompt, {"hbm": hits}, may_hit=may_hit)
    eligible = request.eligible(page_size)
    assert hits <= eligible <= prompt
    assert eligible >= (prompt - 1) // page_size * page_size * may_hit


def test_known_tenants_have_their_series_before_their_first_request(
    registry: CollectorRegistry,
) -> None:
    metrics = RequestMetrics(2, ["a", "b", "c"])
    with metrics.request(_A):
        pass
    for tenant in ("a", "b"):
        eligible = "sglang_ext_eligible_tokens_total"
        assert registry.get_sample_value(eligible, {"tenant": tenant}) == 0
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    assert {sample.labels["tenant"] for sample in samples} == {"a", "b"}


def test_every_observer_sees_every_finished_request(registry: CollectorRegistry) -> None:
    seen: list[FinishedRequest] = []
    metrics = RequestMetrics(2)
    metrics.observers.append(SimpleNamespace(finished=seen.append))
    request = _request("a", 3, {})
    metrics.finished(request)
    assert seen == [request]


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


@pytest.mark.trial(94)
@pytest.mark.parametrize(
    ("cached", "details", "tiers"),
    [
        (5, {}, {"hbm": 5}),
        (0, {"device": 0, "host": 0}, {"hbm": 0}),
        (5, {"device": 2, "host": 3, "storage": 0}, {"hbm": 2, "cpu": 3}),
        (5, {"storage": 5, "storage_backend": "file"}, {"nvme": 5}),
        (5, {"device": 9, "host": None}, {"hbm": 5}),
        (5, {"host": 3, "storage": 4}, {"cpu": 1, "nvme": 4}),
    ],
)
def test_cached_tokens_by_tier(cached: int, details: dict[str, Any], tiers: dict[str, int]) -> None:
    assert by_tier(cached, details) == tiers


@pytest.mark.trial(94)
@given(
    st.integers(0, 300),
    st.dictionaries(st.sampled_from(["device", "host", "storage"]), st.integers(-5, 400)),
)
def test_trial_94_tiers_add_up_to_what_the_client_was_told(
    cached: int, details: dict[str, int]
) -> None:
    assert sum(by_tier(cached, details).values()) == cached


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

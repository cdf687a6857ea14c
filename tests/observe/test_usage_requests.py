"""From SGLang's own collector to the bill: 10,000 finished requests of 5 tenants."""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry
from sglang.srt.observability import metrics_collector

from sglang_ext import tokenizer_metrics
from sglang_ext.metrics import RequestMetrics
from sglang_ext.observe.usage import UsageRecorder
from sglang_ext.observe.usage_store import UsageStore
from sglang_ext.patches.tokenizer_manager import RequestFacts
from sglang_ext.tokenizer_metrics import TenantTokenizerMetrics

_TENANTS = ("a", "b", "c", "d", "e")
_SOURCES = {"device": "hbm", "host": "cpu", "storage": "nvme"}


@pytest.fixture
def metrics(registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch) -> RequestMetrics:
    """The recorder that the collector finds in force, with room for every tenant."""
    metrics = RequestMetrics(10)
    metrics.page_size = 16
    monkeypatch.setattr(tokenizer_metrics, "request_metrics", lambda: metrics)
    # What the engine's flags say about buckets.
    flags = SimpleNamespace(prompt_tokens_buckets=None, generation_tokens_buckets=None)
    monkeypatch.setattr(metrics_collector, "get_observability", lambda: flags)
    return metrics


def _requests(count: int) -> Iterator[tuple[str, int, dict[str, int], int]]:
    """Yield (tenant, prompt, cached by SGLang's source, output)."""
    draw = random.Random(9)
    for _ in range(count):
        prompt, left = draw.randint(1, 5000), 0
        cached: dict[str, int] = {}
        left = (prompt - 1) // 16
        for source in _SOURCES:
            pages = draw.randint(0, left)
            left -= pages
            cached[source] = pages * 16
        yield draw.choice(_TENANTS), prompt, cached, draw.randint(0, 500)


@pytest.mark.trial(94)
def test_the_bill_equals_the_generators_own_count(
    metrics: RequestMetrics, registry: CollectorRegistry, tmp_path: Path
) -> None:
    recorder = UsageRecorder(UsageStore(tmp_path / "usage.db"), clock=lambda: 7200.0)
    metrics.observers.append(recorder)
    collector = TenantTokenizerMetrics(labels={"model_name": "m"}, server_args=SimpleNamespace())
    expected: dict[str, Counter[str]] = {tenant: Counter() for tenant in _TENANTS}
    for number, (tenant, prompt, cached, output) in enumerate(_requests(10_000)):
        told = sum(cached.values())
        collector.observe_one_finished_request(
            {"model_name": "m", "tenant": tenant, "facts": RequestFacts(first_token=0.1)},  # type: ignore[dict-item]
            prompt,
            output,
            told,
            0.5,
            False,
            cached | {"storage_backend": "x"},
        )
        counts = {"requests": 1, "prompt_tokens": prompt, "output_tokens": output}
        counts |= {f"cached_{_SOURCES[source]}_tokens": n for source, n in cached.items()}
        expected[tenant].update(counts | {"computed_tokens": prompt - told})
        if number % 1000 == 999:
            assert recorder.flush()
    rows = recorder.read(7200, 7201)
    found = {cell.tenant: {name: n for name, n in sums.items() if n} for cell, sums in rows}
    assert found == expected
    _counters_agree(registry, expected)


def _counters_agree(registry: CollectorRegistry, expected: dict[str, Counter[str]]) -> None:
    for tenant, counts in expected.items():
        for tier in ("hbm", "cpu", "nvme"):
            labels = {"tenant": tenant, "source": tier}
            value = registry.get_sample_value("sglang_ext_prompt_tokens_total", labels)
            assert value == counts[f"cached_{tier}_tokens"]
        eligible = registry.get_sample_value("sglang_ext_eligible_tokens_total", {"tenant": tenant})
        assert eligible is not None
        assert counts["prompt_tokens"] - counts["computed_tokens"] <= eligible

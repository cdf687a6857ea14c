"""The reference of metrics: complete, documented, and the only place that makes one."""

import ast
import re
from pathlib import Path

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry

from sglang_ext.observe.catalog import METRICS, Kind, Metric, make, table

_ROOT = Path(__file__).parents[2]
_SOURCES = [
    path
    for folder in (
        "sglang_ext",
        "sglang_ext/observe",
        "sglang_ext/gateway",
        "patches",
        "radix",
        "tenancy",
        "tiering",
    )
    for path in (_ROOT / folder).glob("*.py")
]
_UNITS = ("_seconds", "_tokens", "_requests", "_bytes", "_engines")


def test_the_documentation_holds_the_table() -> None:
    assert table() in (_ROOT / "docs" / "metrics.md").read_text("utf-8")


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: metric.name)
def test_names_follow_prometheus(metric: Metric) -> None:
    assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
    assert re.fullmatch(r"[a-z][a-z_]*[a-z]", metric.name)
    if metric.kind is not Kind.COUNTER:
        assert metric.name.endswith(_UNITS)
    assert metric.text.endswith(".")
    assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
    assert set(metric.labels) <= {
        *("tenant", "owner", "tier", "reason", "outcome", "source", "status", "event"),
        *("from", "to", "engine"),
    }


@pytest.mark.parametrize("name", METRICS)
def test_every_entry_can_be_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = CollectorRegistry()
    monkeypatch.setattr("prometheus_client.metrics.REGISTRY", fresh)
    for kind in ("Counter", "Gauge", "Histogram"):
        original = getattr(prometheus_client, kind)
        monkeypatch.setattr(
            prometheus_client,
            kind,
            lambda *args, original=original, **fields: original(*args, registry=fresh, **fields),
        )
    made = make(name)
    assert made._labelnames == METRICS[name].labels
    (family,) = fresh.collect()
    assert family.name == METRICS[name].full_name.removesuffix("_total")


@pytest.mark.parametrize("path", _SOURCES, ids=lambda path: str(path.relative_to(_ROOT)))
def test_nobody_else_makes_a_metric(path: Path) -> None:
    tree = ast.parse(path.read_text("utf-8"))
    imported = [
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    kinds = {f"prometheus_client.{kind}" for kind in ("Counter", "Gauge", "Histogram", "Summary")}
    assert path.name == "catalog.py" or not kinds & set(imported)

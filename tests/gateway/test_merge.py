"""Several engines' answers and metrics as one."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from sglang_ext.gateway.merge import merged, merged_metrics


def test_usage_adds_up() -> None:
    tier = {"held_tokens": 3, "quota_tokens": 10, "hard": True, "reserve_tokens": 0}
    free = {**tier, "quota_tokens": None, "hard": False}
    one = {"tenants": {"a": {"owner": "t:a", "sessions": 1, "tiers": {"hbm": tier, "cpu": free}}}}
    two = {"tenants": {**one["tenants"], "b": {"owner": "t:b"}}}
    whole = merged(one, two)
    assert whole["tenants"]["a"] == {
        "owner": "t:a",
        "sessions": 2,
        "tiers": {
            "hbm": {"held_tokens": 6, "quota_tokens": 20, "hard": True, "reserve_tokens": 0},
            "cpu": {"held_tokens": 6, "quota_tokens": None, "hard": False, "reserve_tokens": 0},
        },
    }
    assert whole["tenants"]["b"] == {"owner": "t:b"}


def test_no_limit_and_a_limit_are_no_limit_and_a_note_is_kept() -> None:
    assert merged(None, 5) is None
    assert merged(5, None) is None
    assert merged(None, "note") == "note"
    assert merged("note", None) == "note"
    assert merged([1], [2]) == [1, 2]


LABEL = st.text(max_size=6)


def page(values: dict[str, float], label: str) -> str:
    registry = CollectorRegistry()
    counter = Counter("sglang_ext_x", "Some.", ["tenant"], registry=registry)
    counter.labels(label).inc(3)
    Gauge("plain", "No label.", registry=registry).set(values.get("plain", 0))
    Histogram("seconds", "How long.", buckets=(1, 2), registry=registry).observe(1.5)
    return generate_latest(registry).decode()


@given(first=LABEL, second=LABEL)
def test_every_sample_is_there_once_with_its_engine(first: str, second: str) -> None:
    pages = [("shared", page({"plain": 1}, first)), ("bank", page({"plain": 2}, second))]
    text = merged_metrics(pages)
    families = list(text_string_to_metric_families(text))
    found = sorted(
        (sample.name, sorted(sample.labels.items()), sample.value)
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    )
    expected = sorted(
        (sample.name, sorted({**sample.labels, "engine": engine}.items()), sample.value)
        for engine, one in pages
        for family in text_string_to_metric_families(one)
        for sample in family.samples
        if not sample.name.endswith("_created")
    )
    assert found == expected
    assert text.count("# TYPE plain ") == text.count("# HELP plain ") == 1


def test_an_engine_label_that_is_there_stays() -> None:
    registry = CollectorRegistry()
    Gauge("ready", "Ready.", ["engine"], registry=registry).labels("bank").set(1)
    text = merged_metrics([("gateway", generate_latest(registry).decode())])
    assert 'ready{engine="bank"} 1.0' in text
    assert "gateway" not in text
    assert merged_metrics([]) == ""

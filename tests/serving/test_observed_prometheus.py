"""Every rule and every panel on a real Prometheus that scrapes a real server."""

import math
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from sglang_ext.observe.dashboard import PRICES, ROWS
from tests.serving.load import Load
from tests.serving.observed import Observed, wait_until
from tests.serving.prometheus import RULES, Prometheus

pytestmark = [
    pytest.mark.serving,
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="Prometheus is not installed; Debian's package prometheus has it: make tools",
    ),
]

_VARIABLES = {
    "tenant": ".*",
    "tier": ".*",
    "__rate_interval": "5m",
    "__range": "1h",
    **{name: value for name, (_, value) in PRICES.items()},
}
_PANELS = {
    f"{row}: {panel.title}: {legend}": expression
    for row, panels in ROWS.items()
    for panel in panels
    for legend, expression in panel.queries.items()
}
_RULES = [
    rule for group in yaml.safe_load(RULES.read_text("utf-8"))["groups"] for rule in group["rules"]
]
_ALERTS = {rule["alert"]: rule["expr"] for rule in _RULES if "alert" in rule}
_RECORDED = {rule["record"]: rule["expr"] for rule in _RULES if "record" in rule}
# Prometheus stretches rate() and increase() to the ends of their window, each series by another
# part; to compare with a count, growth is read from the first and the last scrape instead.
_GROWTH = re.compile(r"(?:rate|increase)\((\w+(?:{[^}]*})?)\[[^]]+\]\)")
_FIRING = {"SglangExtEngineDown", "SglangExtQuotaNearlyUsed"}


@pytest.fixture(scope="module")
def load(observed: Observed) -> Load:
    """What the generator has sent and counted between the first and the last scrape."""
    return Load(observed)


@pytest.fixture(scope="module")
def prometheus(
    observed: Observed, load: Load, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """A Prometheus that has seen everything of ``load``, from before it began."""
    warm = Load(observed)
    for tenant in ("a", "b"):
        warm.conversations(tenant, "warm", 2)
    assert observed.client("nobody").get("/v1/models").status_code == 401
    server = observed.server.url
    prometheus = Prometheus(tmp_path_factory.mktemp("prometheus"), server, "key-admin")
    try:
        prometheus.wait_for(f'up{{instance="{prometheus.target}"}}', 1)
        prometheus.scraped_again()
        _two_tenants(load)
        assert observed.client("nobody").get("/v1/models").status_code == 401
        prometheus.scraped_again()
        yield prometheus
    finally:
        prometheus.end()


def _two_tenants(load: Load) -> None:
    """Send more than the GPU's memory holds, and come back to what went to a lower tier."""
    for tenant, talks in (("a", 6), ("b", 3)):
        for talk in range(talks):
            load.conversations(tenant, f"talk {talk}", 3, 300)
    for tenant in ("a", "b", "a", "b"):
        load.conversations(tenant, "talk 0", 3, 300)
    # The same once more, so that b's latest pages fill its small quota in HBM.
    for talk in range(3):
        load.conversations("b", f"talk {talk}", 3, 300)


def _filled(expression: str) -> str:
    """Return an expression with the dashboard's variables put in, as Grafana does."""
    return re.sub(r"\$(\w+)", lambda match: _VARIABLES[match[1]], expression)


def _exact(expression: str) -> str:
    """Return an expression with growth over the whole run in the place of rates."""
    grown = r"(max_over_time(\1[1h]) - min_over_time(\1[1h]))"
    text, found = _GROWTH.subn(grown, _filled(expression))
    assert found
    return text


def _by(rows: dict[frozenset[tuple[str, str]], float], *labels: str) -> dict[Any, float]:
    """Return values by the value of a label, or by the values of some."""
    found = {}
    for row, value in rows.items():
        named = dict(row)
        key = tuple(named[label] for label in labels)
        found[key if len(labels) > 1 else key[0]] = value
    return found


def test_every_rule_is_evaluated_without_an_error(prometheus: Prometheus) -> None:
    groups = prometheus.get("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == 15
    assert {rule["health"] for rule in rules} == {"ok"}, rules
    for rule in rules:
        if rule["type"] == "recording":
            assert prometheus.query(rule["name"]), f"{rule['name']} has no data"


@pytest.mark.parametrize("alert", _ALERTS)
def test_every_alert_rests_on_data(prometheus: Prometheus, alert: str) -> None:
    """Without its threshold, each says a number; a misspelt one would be silent for ever."""
    measured = re.split(r"\s(?:>|<|==)\s", _ALERTS[alert])[0]
    assert prometheus.query(measured), measured
    if alert in _FIRING:
        assert prometheus.query(_ALERTS[alert]), alert


def test_the_engine_that_is_down_is_named(prometheus: Prometheus) -> None:
    rows = prometheus.query(_ALERTS["SglangExtEngineDown"])
    assert _by(rows, "instance") == {prometheus.dead: 0}


@pytest.mark.parametrize("purpose", _PANELS)
def test_every_panel_has_data(prometheus: Prometheus, purpose: str) -> None:
    rows = prometheus.query(_filled(_PANELS[purpose]))
    assert rows, _filled(_PANELS[purpose])
    assert not all(math.isnan(value) for value in rows.values()), rows


def _grown(prometheus: Prometheus, metric: str, *labels: str) -> dict[Any, float]:
    """Return by how much counters grew from the first scrape to the last, where they did."""
    expression = _exact(f"sum by ({', '.join(labels)}) (increase({metric}[1h]))")
    return {
        key: value for key, value in _by(prometheus.query(expression), *labels).items() if value
    }


@pytest.mark.trial(94)
def test_trial_94_counters_grew_by_what_the_clients_were_told(
    prometheus: Prometheus, load: Load
) -> None:
    grown = _grown(prometheus, "sglang_ext_prompt_tokens_total", "tenant", "source")
    told = {
        (tenant, source): count
        for tenant, counts in load.counts.items()
        for source in ("hbm", "cpu", "nvme", "computed")
        if (count := counts[_column(source)])
    }
    assert grown == told
    output = _grown(prometheus, "sglang_ext_generated_tokens_total", "tenant")
    assert output == {tenant: counts["output_tokens"] for tenant, counts in load.counts.items()}
    assert any(tier != "hbm" for _, tier in told if tier != "computed"), "no lower tier was hit"


def _column(source: str) -> str:
    return "computed_tokens" if source == "computed" else f"cached_{source}_tokens"


@pytest.mark.trial(96)
def test_trial_96_the_hit_rate_is_that_of_the_load(prometheus: Prometheus, load: Load) -> None:
    eligible = _grown(prometheus, "sglang_ext_eligible_tokens_total", "tenant")
    name = "tenant:sglang_ext_hit_ratio:rate5m"
    found = _by(prometheus.query(_exact(_RECORDED[name])), "tenant")
    recorded = _by(prometheus.query(name), "tenant")
    for tenant, counts in load.counts.items():
        hits = counts["prompt_tokens"] - counts["computed_tokens"]
        assert hits <= eligible[tenant] <= counts["prompt_tokens"]
        assert found[tenant] == pytest.approx(hits / eligible[tenant], rel=1e-6)
        assert recorded[tenant] == pytest.approx(found[tenant], abs=0.05)


def test_panels_say_what_the_load_did(prometheus: Prometheus, load: Load) -> None:
    totals = sum(load.counts.values(), Counter())
    panels = {
        "Tenants: Output tokens: {{tenant}}": {
            tenant: counts["output_tokens"] for tenant, counts in load.counts.items()
        },
        "Tenants: Prompt tokens by where their KV came from: {{source}}": {
            source: totals[_column(source)]
            for source in ("computed", "hbm", "cpu", "nvme")
            if totals[_column(source)]
        },
        "Fairness: Requests ended: {{tenant}} {{outcome}}": {
            (tenant, "ok"): counts["requests"] for tenant, counts in load.counts.items()
        },
        "Money: Bill for tokens: {{tenant}}": {
            tenant: (
                1.0 * counts["computed_tokens"]
                + 0.25 * (counts["prompt_tokens"] - counts["computed_tokens"])
                + 3.0 * counts["output_tokens"]
            )
            / 1e6
            for tenant, counts in load.counts.items()
        },
        "Money: Saved by the cache: {{tenant}}": {
            tenant: 0.75 * (counts["prompt_tokens"] - counts["computed_tokens"]) / 1e6
            for tenant, counts in load.counts.items()
        },
    }
    for purpose, known in panels.items():
        labels = re.findall(r"{{(\w+)}}", purpose)
        rows = _by(prometheus.query(_exact(_PANELS[purpose])), *labels)
        assert {key: value for key, value in rows.items() if value} == pytest.approx(known), purpose


def test_what_is_held_is_what_the_server_says(prometheus: Prometheus, observed: Observed) -> None:
    """Pages move by themselves for a while, so the two may be told a second apart."""
    wait_until(lambda: _held(prometheus) == _told(observed))
    tiers = observed.client("admin").get("/ext/v1/overview").json()["tiers"]
    assert {tier["name"] for tier in tiers} == {"hbm", "cpu", "nvme"}
    use = _by(prometheus.query("tier:sglang_ext_use:ratio"), "tier")
    for tier in tiers:
        assert use[tier["name"]] == pytest.approx(sum(tier["held"].values()) / tier["capacity"])


def _held(prometheus: Prometheus) -> dict[Any, float]:
    return _by(prometheus.query("sglang_ext_held_tokens"), "owner", "tier")


def _told(observed: Observed) -> dict[Any, float]:
    owners = observed.client("admin").get("/ext/v1/overview").json()["owners"]
    return {
        (owner["name"], tier): tokens for owner in owners for tier, tokens in owner["held"].items()
    }


def test_answers_within_the_slo_are_counted_exactly(prometheus: Prometheus) -> None:
    slow = prometheus.query("job:sglang_ext_ttft_slow:ratio_rate5m")
    (part,) = slow.values()
    assert 0 <= part <= 1

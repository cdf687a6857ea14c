"""Rules and dashboard as files: what they name exists, and the tools that read them agree."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_ext.observe.catalog import METRICS, PREFIX, Kind
from sglang_ext.observe.dashboard import PRICES, ROWS, dashboard

_FOLDER = Path(__file__).parents[2] / "sglang_ext" / "dashboards"
_RULES = _FOLDER / "prometheus" / "rules.yml"
_JSON = _FOLDER / "grafana" / "dashboards" / "sglang_ext.json"
_NAME = re.compile(rf"(?<![:\w]){PREFIX}\w+")
_RECORDED = re.compile(rf"\w+:{PREFIX}[\w:]+")

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not installed; Debian's package prometheus has it: make tools",
)


def _rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(_RULES.read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def _expressions() -> dict[str, str]:
    """Return every expression of the rules and of the dashboard by what it is for."""
    rules = {rule.get("record") or rule["alert"]: rule["expr"] for rule in _rules()}
    panels = {
        f"{row}: {panel.title}: {legend}": expression
        for row, found in ROWS.items()
        for panel in found
        for legend, expression in panel.queries.items()
    }
    return rules | panels


def _published() -> set[str]:
    """Return every name that our metrics have on /metrics."""
    names = {metric.full_name for metric in METRICS.values()}
    histograms = [m.full_name for m in METRICS.values() if m.kind is Kind.HISTOGRAM]
    parts = ("_bucket", "_count", "_sum")
    return names | {name + part for name in histograms for part in parts}


@pytest.mark.parametrize("purpose", _expressions())
def test_every_metric_in_an_expression_exists(purpose: str) -> None:
    expression = _expressions()[purpose]
    recorded = {rule["record"] for rule in _rules() if "record" in rule}
    assert set(_RECORDED.findall(expression)) <= recorded
    assert set(_NAME.findall(expression)) <= _published()
    assert _RECORDED.search(expression) or _NAME.search(expression) or "up{" in expression


def test_every_row_that_was_asked_for_is_there() -> None:
    assert list(ROWS) == ["Service", "Tenants", "Tiers", "Fairness", "Money"]


def test_the_file_is_what_the_table_says() -> None:
    assert json.loads(_JSON.read_text("utf-8")) == dashboard()


def test_every_variable_is_defined() -> None:
    known = {variable["name"] for variable in dashboard()["templating"]["list"]}
    built_in = {"__rate_interval", "__range"}
    used = {name for text in _expressions().values() for name in re.findall(r"\$(\w+)", text)}
    assert used - built_in <= known
    assert used >= PRICES.keys()


def test_the_file_is_of_grafanas_schema() -> None:
    """Grafana's own types, made from its schema 36, know every field and keep every value."""
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    known = json.loads(encoder.JSONEncoder().encode(Dashboard.from_json(dashboard())))
    assert _lost(dashboard(), known) == []
    assert Dashboard().schema_version == dashboard()["schemaVersion"]
    assert _lost({"pannels": []}, known) == [".pannels"]


def _lost(ours: Any, known: Any, path: str = "") -> list[str]:
    """Return where ``ours`` has something that ``known`` has not, or has otherwise."""
    if isinstance(ours, dict) and isinstance(known, dict):
        return [
            lost
            for name, value in ours.items()
            for lost in _lost(value, known.get(name), f"{path}.{name}")
        ]
    if isinstance(ours, list) and isinstance(known, list) and len(ours) == len(known):
        pairs = enumerate(zip(ours, known, strict=True))
        return [lost for place, pair in pairs for lost in _lost(*pair, f"{path}[{place}]")]
    return [] if ours == known else [path]


def test_no_two_panels_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken
        taken |= cells


@pytest.mark.parametrize("path", sorted(_FOLDER.rglob("*.yml")), ids=lambda path: path.name)
def test_provisioning_is_yaml_without_a_key(path: Path) -> None:
    assert yaml.safe_load(path.read_text("utf-8"))
    assert "Bearer" not in path.read_text("utf-8")


@needs_promtool
@pytest.mark.parametrize(
    "command",
    [["check", "rules", "rules.yml"], ["test", "rules", "rules_test.yml"]],
    ids=["check", "test"],
)
def test_promtool_accepts_the_rules(command: list[str]) -> None:
    done = subprocess.run(
        ["promtool", *command], cwd=_RULES.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_accepts_the_scrape_configuration(tmp_path: Path) -> None:
    shutil.copytree(_RULES.parent, tmp_path / "prometheus")
    path = tmp_path / "prometheus" / "prometheus.yml"
    (tmp_path / "admin_key").write_text("key-admin")
    path.write_text(path.read_text().replace("/run/admin_key", str(tmp_path / "admin_key")))
    command = ["promtool", "check", "config", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_every_alert_is_seen_to_fire() -> None:
    """By ``promtool test rules``: an alert without a case there would never have been tried."""
    text = (_FOLDER / "prometheus" / "rules_test.yml").read_text("utf-8")
    fired = {
        case["alertname"]
        for test in yaml.safe_load(text)["tests"]
        for case in test["alert_rule_test"]
        if case["exp_alerts"]
    }
    assert fired == {rule["alert"] for rule in _rules() if "alert" in rule}

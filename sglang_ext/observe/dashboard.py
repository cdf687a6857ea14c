"""The Grafana dashboard, as a table of panels; ``python -m sglang_ext.observe.dashboard`` prints
the JSON that lies in ``dashboards/grafana/dashboards``.

The JSON is of Grafana's dashboard schema 36 (Grafana 10.1), which later versions read as well.
"""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

__all__ = ["PRICES", "ROWS", "Panel", "dashboard"]

SCHEMA_VERSION = 36
_COLUMNS = 3
_WIDTH, _HEIGHT = 24 // _COLUMNS, 8
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


class Panel(NamedTuple):
    """One panel: its queries by legend, the unit as Grafana names it, and what it shows."""

    title: str
    queries: dict[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    text: str = ""


PRICES = {
    "price_prompt": ("Price of 1M computed prompt tokens", "1.00"),
    "price_cached": ("Price of 1M cached prompt tokens", "0.25"),
    "price_output": ("Price of 1M output tokens", "3.00"),
    "price_hbm": ("Price of 1M token-hours in HBM", "2.00"),
    "price_below": ("Price of 1M token-hours in CPU and NVMe", "0.10"),
}
"""Variables of the dashboard: name, label and first value. Whoever looks sets their own."""

_TTFT = "rate(sglang_ext_time_to_first_token_seconds_bucket[$__rate_interval])"
_QUEUE = 'rate(sglang_ext_queue_time_seconds_bucket{tenant=~"$tenant"}[$__rate_interval])'
_PROMPT = 'sglang_ext_prompt_tokens_total{tenant=~"$tenant"'
_OUTPUT = 'sglang_ext_generated_tokens_total{tenant=~"$tenant"}'
_BILL = (
    f"sum by (tenant) (increase({_PROMPT}, source='computed'}}[$__range])) / 1e6 * $price_prompt"
    f" + sum by (tenant) (increase({_PROMPT}, source!='computed'}}[$__range])) / 1e6"
    f" * $price_cached + sum by (tenant) (increase({_OUTPUT}[$__range])) / 1e6 * $price_output"
)
_SAVED = (
    f"sum by (tenant) (increase({_PROMPT}, source!='computed'}}[$__range])) / 1e6"
    " * ($price_prompt - $price_cached)"
)
_HBM_TIME = 'increase(sglang_ext_token_seconds_total{tier="hbm"}[$__range])'
_LOWER_TIME = 'increase(sglang_ext_token_seconds_total{tier!="hbm"}[$__range])'
_RENT = (
    f"sum by (owner) ({_HBM_TIME}) / 3600e6 * $price_hbm"
    f" + sum by (owner) ({_LOWER_TIME}) / 3600e6 * $price_below"
)

ROWS: dict[str, list[Panel]] = {
    "Service": [
        Panel(
            "Engines that answer",
            {"up": 'sum(up{job="sglang_ext"})'},
            kind="stat",
        ),
        Panel(
            "First token within 500 ms",
            {"within": "1 - job:sglang_ext_ttft_slow:ratio_rate5m"},
            "percentunit",
            "stat",
            "The SLO is 99 %.",
        ),
        Panel(
            "Requests",
            {"{{outcome}}": "sum by (outcome) (rate(sglang_ext_requests_total[$__rate_interval]))"},
            "reqps",
        ),
        Panel(
            "Time to first token",
            {
                "p50": f"histogram_quantile(0.5, sum by (le) ({_TTFT}))",
                "p99": f"histogram_quantile(0.99, sum by (le) ({_TTFT}))",
            },
            "s",
        ),
        Panel(
            "Tokens",
            {
                "prompt": "sum(rate(sglang_ext_prompt_tokens_total[$__rate_interval]))",
                "output": "sum(rate(sglang_ext_generated_tokens_total[$__rate_interval]))",
            },
        ),
        Panel(
            "Requests without a valid key",
            {
                "{{status}}": "sum by (status) "
                "(rate(sglang_ext_refused_requests_total[$__rate_interval]))"
            },
            "reqps",
        ),
    ],
    "Tenants": [
        Panel(
            "Hit rate",
            {"{{tenant}}": 'tenant:sglang_ext_hit_ratio:rate5m{tenant=~"$tenant"}'},
            "percentunit",
            text="Tokens from any tier over tokens that could have come from one.",
        ),
        Panel(
            "Hit rate by tier",
            {
                "{{tenant}} {{source}}": "tenant_source:sglang_ext_hit_ratio:rate5m"
                '{tenant=~"$tenant"}'
            },
            "percentunit",
        ),
        Panel(
            "Time to first token, p99",
            {"{{tenant}}": 'tenant:sglang_ext_ttft_seconds:p99_5m{tenant=~"$tenant"}'},
            "s",
        ),
        Panel(
            "Prompt tokens by where their KV came from",
            {"{{source}}": f"sum by (source) (rate({_PROMPT}}}[$__rate_interval]))"},
        ),
        Panel(
            "Output tokens",
            {"{{tenant}}": f"sum by (tenant) (rate({_OUTPUT}[$__rate_interval]))"},
        ),
        Panel(
            "Recomputed tokens",
            {
                "{{tenant}}": "sum by (tenant) (rate(sglang_ext_recomputed_tokens_total"
                '{tenant=~"$tenant"}[$__rate_interval]))'
            },
            text="Computed again although computed before: what more memory would save.",
        ),
    ],
    "Tiers": [
        Panel("Full", {"{{tier}}": "tier:sglang_ext_use:ratio"}, "percentunit"),
        Panel(
            "Held by owner",
            {"{{owner}}": 'sum by (owner) (sglang_ext_held_tokens{tier=~"$tier"})'},
            text="Tokens in the tiers that are chosen above.",
        ),
        Panel(
            "Bytes by owner",
            {"{{owner}}": 'sum by (owner) (sglang_ext_held_bytes{tier=~"$tier"})'},
            "bytes",
        ),
        Panel(
            "Evicted tokens",
            {"{{tier}} {{reason}}": "tier_reason:sglang_ext_evicted_tokens:rate5m"},
        ),
        Panel(
            "Moved",
            {
                "{{from}} to {{to}}": "sum by (from, to) "
                "(rate(sglang_ext_moved_bytes_total[$__rate_interval]))"
            },
            "Bps",
        ),
        Panel(
            "Pages on NVMe",
            {"{{event}}": "sum by (event) (rate(sglang_ext_store_events_total[$__rate_interval]))"},
        ),
    ],
    "Fairness": [
        Panel(
            "Queue time, p99",
            {"{{tenant}}": f"histogram_quantile(0.99, sum by (tenant, le) ({_QUEUE}))"},
            "s",
        ),
        Panel(
            "Waiting",
            {"{{tenant}}": 'sum by (tenant) (sglang_ext_queued_requests{tenant=~"$tenant"})'},
        ),
        Panel(
            "Owed to a waiting tenant",
            {"{{tenant}}": 'sum by (tenant) (sglang_ext_deficit_tokens{tenant=~"$tenant"})'},
            text="Weighted tokens to its fair share; below 0 it had more.",
        ),
        Panel(
            "Requests ended",
            {
                "{{tenant}} {{outcome}}": "sum by (tenant, outcome) (rate("
                'sglang_ext_requests_total{tenant=~"$tenant"}[$__rate_interval])) > 0'
            },
            "reqps",
        ),
        Panel(
            "Quota used",
            {"{{owner}} {{tier}}": 'owner_tier:sglang_ext_quota_use:ratio{tier=~"$tier"}'},
            "percentunit",
        ),
        Panel(
            "Reserved",
            {"{{owner}} {{tier}}": "sum by (owner, tier) (sglang_ext_reserve_tokens)"},
        ),
    ],
    "Money": [
        Panel("Bill for tokens", {"{{tenant}}": _BILL}, "currencyUSD", "bargauge"),
        Panel(
            "Bill for memory",
            {"{{owner}}": _RENT},
            "currencyUSD",
            "bargauge",
            "Token-hours in each tier at the prices above.",
        ),
        Panel(
            "Saved by the cache",
            {"{{tenant}}": _SAVED},
            "currencyUSD",
            "bargauge",
            "What cached tokens would have cost more if they had been computed.",
        ),
    ],
}
"""Every panel of the dashboard by row."""


def dashboard() -> dict[str, Any]:
    """Return the dashboard, ready for JSON."""
    return {
        "uid": "sglang-ext",
        "title": "sglang_ext",
        "tags": ["sglang", "llm"],
        "schemaVersion": SCHEMA_VERSION,
        "timezone": "browser",
        "editable": True,
        "fiscalYearStartMonth": 0,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": list(_variables())},
        "panels": list(_panels()),
    }


def _variables() -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "type": "datasource", "query": "prometheus", "hide": 0}
    for name, metric in (("tenant", "requests_total"), ("tier", "held_tokens")):
        yield {
            "name": name,
            "type": "query",
            "datasource": _SOURCE,
            "query": f"label_values(sglang_ext_{metric}, {name})",
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"selected": True, "text": "All", "value": "$__all"},
            "hide": 0,
        }
    for name, (label, value) in PRICES.items():
        current = {"selected": True, "text": value, "value": value}
        yield {
            **{"name": name, "label": label, "type": "textbox", "query": value},
            **{"current": current, "hide": 0},
        }


def _panels() -> Iterator[dict[str, Any]]:
    number, top = 0, 0
    for title, panels in ROWS.items():
        number += 1
        place = {"x": 0, "y": top, "w": 24, "h": 1}
        yield {
            **{"id": number, "type": "row", "title": title, "gridPos": place},
            **{"collapsed": False, "panels": []},
        }
        top += 1
        for index, panel in enumerate(panels):
            number += 1
            row, column = divmod(index, _COLUMNS)
            where = {"x": column * _WIDTH, "y": top + row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            yield _panel(number, panel, where)
        top += -(-len(panels) // _COLUMNS) * _HEIGHT


def _panel(number: int, panel: Panel, where: dict[str, int]) -> dict[str, Any]:
    instant = panel.kind == "bargauge"
    targets = [
        {
            **{"refId": chr(ord("A") + index), "datasource": _SOURCE, "expr": expression},
            **{"legendFormat": legend, "instant": instant, "range": not instant},
        }
        for index, (legend, expression) in enumerate(panel.queries.items())
    ]
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "transparent": False,
        "datasource": _SOURCE,
        "gridPos": where,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "options": {},
        "targets": targets,
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=1))

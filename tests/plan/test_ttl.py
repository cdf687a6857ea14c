"""What TTL a tenant should have, from texts whose return is known."""

import csv
import io
import json
import random
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.cli import main
from sglang_ext.errors import PlanError
from sglang_ext.observe.ghosts import GhostPages
from sglang_ext.observe.reuse import BOUNDS, COLUMNS, reuse
from sglang_ext.observe.usage_store import AMOUNTS
from sglang_ext.plan.ttl import Reuse, advise, read_usage
from sglang_ext.plan.ttl_tables import as_duration
from sglang_ext.tenancy.units import parse_duration
from sglang_ext.types import Tier

_PAGE = 16
_TOKENS = 161
_NO_LIMIT = dict.fromkeys((Tier.HBM, Tier.CPU, Tier.NVME), 10**12)


def _rows(uses: Sequence[tuple[float, int]], tenant: str = "a") -> list[dict[str, Any]]:
    """Return an export for prompts of 160 tokens, sent at a second and named by a number."""
    now = 0.0
    ghosts = GhostPages(clock=lambda: now)
    hours: dict[int, Counter[str]] = {}
    for now, name in uses:
        text = array("q", range(name * 1000, name * 1000 + _TOKENS))
        sums = hours.setdefault(int(now) // 3600, Counter())
        sums.update({"prompt_tokens": _TOKENS - 1})
        sums.update(reuse(ghosts.computed(tenant, text, 0, _PAGE).idle, _PAGE))
    return [_row(hour, tenant, sums) for hour, sums in hours.items()]


def _row(hour: int, tenant: str, sums: Mapping[str, int]) -> dict[str, Any]:
    moment = f"2026-11-{1 + hour // 24:02}T{hour % 24:02}:00:00Z"
    return {"hour": moment, "tenant": tenant, **dict.fromkeys(AMOUNTS, 0), **sums}


def test_hits_kept_are_those_of_a_cache_with_that_ttl() -> None:
    """Against a cache that is played: a text is there while it was last used within the TTL."""
    draw = random.Random(3)
    uses = sorted((draw.uniform(0, 48 * 3600), draw.randrange(80)) for _ in range(2_000))
    found = Reuse.of(_rows(uses), "a")
    for ttl in BOUNDS:
        hits = returns = 0
        last: dict[int, float] = {}
        for at, name in uses:
            returns += name in last
            hits += name in last and int(at) - int(last[name]) <= ttl
            last[name] = at
        assert found.reused == returns * (_TOKENS - 1)
        assert found.kept(ttl) == pytest.approx(hits / returns)


def test_tokens_held_are_about_those_of_a_cache_with_that_ttl() -> None:
    draw = random.Random(4)
    uses = sorted((draw.uniform(0, 48 * 3600), draw.randrange(400)) for _ in range(8_000))
    found = Reuse.of(_rows(uses), "a")
    by_name: dict[int, list[float]] = {}
    for at, name in uses:
        by_name.setdefault(name, []).append(at)
    for ttl in (600, 3_600, 7_200, 21_600):
        gaps = [b - a for times in by_name.values() for a, b in zip(times, times[1:], strict=False)]
        seconds = sum(min(gap, ttl) for gap in gaps) + ttl * len(by_name)
        exact = seconds * (_TOKENS - 1) / (48 * 3600)
        assert found.held(ttl) == pytest.approx(exact, rel=0.15)
    # A few pages share a slot of the memory, and are forgotten.
    assert found.held(BOUNDS[-1]) == pytest.approx(400 * (_TOKENS - 1), rel=0.05)


def test_each_tier_gets_the_shortest_ttl_that_keeps_its_share() -> None:
    """Six texts of ten come back in 25 s, three in 50 minutes, one in 20 hours."""
    gaps = [25.0] * 6 + [3_000.0] * 3 + [72_000.0]
    uses = sorted(
        (start, name) for name, gap in enumerate(gaps * 3) for start in (10.0, 10.0 + gap)
    )
    found = Reuse.of(_rows(uses), "a")
    assert [one.ttl for one in advise(found, _NO_LIMIT)] == [30, 3_600, 86_400]


def test_what_does_not_fit_the_quota_is_cut_and_no_tier_is_shorter_than_the_one_above() -> None:
    uses = [(gap * turn + name, name) for name in range(100) for turn, gap in enumerate((0, 1_500))]
    found = Reuse.of(_rows(sorted(uses)), "a")
    assert [one.ttl for one in advise(found, _NO_LIMIT)] == [1_800] * 3
    tight = advise(found, {Tier.HBM: 1_000, Tier.CPU: 500, Tier.NVME: 10**9})
    assert found.held(tight[0].ttl) <= 1_000 < found.held(1_800)
    assert tight[1].ttl == tight[0].ttl and "hbm" in tight[1].reason
    assert tight[2].ttl == 1_800


def test_public_text_that_others_computed_is_not_the_tenants_reuse_until_it_is_used_again() -> None:
    ghosts = GhostPages()
    text = array("q", range(_TOKENS))
    assert not len(ghosts.computed("a", text, _TOKENS - 1, _PAGE).idle)
    assert not len(ghosts.computed("b", text, 0, _PAGE).idle)
    assert len(ghosts.computed("b", text, _TOKENS - 1, _PAGE).idle) == 10


@pytest.mark.parametrize("form", ["json", "csv"])
def test_the_command_answers_from_an_export(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = _rows([(0.0, 1), (200.0, 1), (200.0, 2)]) + [_row(0, "b", {"prompt_tokens": 9})]
    path = tmp_path / "usage"
    text = io.StringIO()
    if form == "json":
        json.dump({"usage": rows}, text)
    else:
        writer = csv.DictWriter(text, ["hour", "tenant", *AMOUNTS])
        writer.writeheader()
        writer.writerows(rows)
    path.write_text(text.getvalue())
    assert main(["plan", "--usage", str(path), "--tenant", "a"]) == 0
    assert "ttl: {hbm: 5m, cpu: 5m, nvme: 5m}" in capsys.readouterr().out
    assert main(["plan", "--usage", str(path), "--tenant", "b"]) == 2
    assert "no text twice" in capsys.readouterr().err
    assert main(["plan", "--usage", str(path), "--tenant", "c"]) == 2
    assert "the export has a, b" in capsys.readouterr().err


_POLICY = """
version: 1
tiers: {cpu: {size: 1GB}}
tenants:
  a: {api_keys: [], quota: {hbm: 1000tok, cpu: 2000tok}, ttl: {hbm: 30s, cpu: 10m}}
"""


def test_quotas_and_ttls_of_the_policy_are_the_measure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"intermediate_size": 128, "vocab_size": 1000}
    uses = [(gap * turn + name, name) for name in range(100) for turn, gap in enumerate((0, 1_500))]
    for name, text in (
        ("config.json", json.dumps(config)),
        ("policy.yaml", _POLICY),
        ("usage.json", json.dumps({"usage": _rows(sorted(uses))})),
    ):
        (tmp_path / name).write_text(text)
    asked = ["--usage", "usage.json", "--model", "config.json", "--policy", "policy.yaml"]
    given = [str(tmp_path / word) if "." in word else word for word in asked]
    assert main(["plan", *given, "--tenant", "a"]) == 0
    shown = capsys.readouterr().out
    assert "fit its 2,000" in shown and "10m keeps 0.0%" in shown and "nvme" not in shown


def test_an_export_of_before_and_a_file_of_another_kind_are_refused(tmp_path: Path) -> None:
    old = [
        {name: value for name, value in row.items() if name not in COLUMNS}
        for row in _rows([(0, 1)])
    ]
    with pytest.raises(PlanError, match="older"):
        Reuse.of(old, "a")
    (tmp_path / "x").write_text('{"other": 1}')
    with pytest.raises(PlanError, match="no export"):
        read_usage(tmp_path / "x")


def test_durations_are_those_of_the_policy_file() -> None:
    assert all(parse_duration(as_duration(bound)) == bound for bound in BOUNDS)

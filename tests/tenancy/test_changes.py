"""What changed, as the audit log shows it, and what may not change live."""

import json
from typing import Any

import pytest
from hypothesis import given, settings

from sglang_ext.errors import PolicyError
from sglang_ext.tenancy.changes import Change, check_live, diff, gone_owners, gone_tenants
from sglang_ext.tenancy.loader import build_policy, parse_policy
from tests.tenancy.documents import policies

DIGEST = "sha256:" + "a" * 64
OTHER = "sha256:" + "b" * 64


def rows(old: str, new: str) -> list[Change]:
    return diff(*(parse_policy(f"version: 1\n{text}") for text in (old, new)))


@settings(deadline=None)
@given(policies)
def test_nothing_changed(document: dict[str, Any]) -> None:
    assert diff(build_policy(document), build_policy(document)) == []


@settings(deadline=None)
@given(policies, policies)
def test_back_again_is_the_mirror(one: dict[str, Any], other: dict[str, Any]) -> None:
    mirror = {"added": "removed", "removed": "added", "changed": "changed"}
    there = diff(build_policy(one), build_policy(other))
    back = diff(build_policy(other), build_policy(one))
    assert back == [Change(row.path, mirror[row.change], row.new, row.old) for row in there]
    assert (not there) == (one == other)


@settings(deadline=None)
@given(policies, policies)
def test_the_changes_lead_from_one_to_the_other(one: dict[str, Any], other: dict[str, Any]) -> None:
    before, after = naive(one), naive(other)
    for row in diff(build_policy(one), build_policy(other)):
        if row.change == "removed":
            del before[row.path]
        else:
            before[row.path] = after[row.path] if "api_keys" in row.path else row.new
    assert before == after


@settings(deadline=None)
@given(policies, policies)
def test_no_digest_in_any_row(one: dict[str, Any], other: dict[str, Any]) -> None:
    text = json.dumps([row.row() for row in diff(build_policy(one), build_policy(other))])
    assert "sha256:" not in text


def naive(document: Any, path: str = "") -> dict[str, Any]:
    """Every field by its path."""
    if not isinstance(document, dict):
        return {path: document}
    found: dict[str, Any] = {path: {}} if path else {}
    for name, value in document.items():
        found |= naive(value, f"{path}.{name}" if path else name)
    return found


def test_rows_of_an_added_and_a_changed_tenant() -> None:
    old = "tenants: {a: {weight: 1}}"
    new = f"tenants: {{a: {{weight: 2}}, b: {{api_keys: ['{DIGEST}']}}}}"
    assert [row.row() for row in rows(old, new)] == [
        {"path": "tenants.a.weight", "change": "changed", "old": 1, "new": 2},
        {"path": "tenants.b", "change": "added", "new": {}},
        {"path": "tenants.b.api_keys", "change": "added"},
    ]


def test_another_key_is_only_said_to_be_another() -> None:
    old, new = (f"tenants: {{a: {{api_keys: ['{key}']}}}}" for key in (DIGEST, OTHER))
    assert rows(old, new) == [Change("tenants.a.api_keys", "changed")]


def test_no_prompt_is_shown() -> None:
    (row,) = rows("", "public_prefixes: [{name: p, system: a secret text}]")
    assert row == Change("public_prefixes", "added")


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("", "engine: {page_size: 32}", "engine.page_size: found 32, in force is 16"),
        ("", "engine: {kv_cache_dtype: bf16}", "engine.kv_cache_dtype: found bf16, in force is au"),
        ("", "tiers: {cpu: {size: 2GB}}", "tiers.cpu.size: found 2GB, in force is nothing"),
        (
            "tiers: {cpu: {size: 2GB}, nvme: {size: 4GB, path: /a}}",
            "tiers: {cpu: {size: 2GB}, nvme: {size: 4GB, path: /b}}",
            "tiers.nvme.path: found /b, in force is /a",
        ),
        (
            "tiers: {cpu: {size: 2GB}, nvme: {size: 4GB, path: /a, master_key: /k}}",
            "tiers: {cpu: {size: 2GB}, nvme: {size: 4GB, path: /a}}",
            "tiers.nvme.master_key: found nothing, in force is /k",
        ),
        ("", "metrics: {tenants: top 5}", "metrics.tenants: found 5, in force is 50"),
        (
            "",
            "public_prefixes: [{name: p, system: my text}]",
            "public_prefixes: found p, in force is nothing",
        ),
        (
            "public_prefixes: [{name: p, system: my text}]",
            "public_prefixes: [{name: p, system: my word}]",
            "public_prefixes: found other texts, in force is their texts",
        ),
    ],
)
def test_what_only_a_restart_changes(old: str, new: str, problem: str) -> None:
    policies = [parse_policy(f"version: 1\n{text}", check_supported=False) for text in (old, new)]
    with pytest.raises(PolicyError) as caught:
        check_live(*policies)
    assert str(caught.value).startswith(problem)
    assert "while the server runs" in str(caught.value)
    assert "my" not in str(caught.value)
    check_live(policies[0], policies[0])


@pytest.mark.parametrize("field", ["gpus", "isolation"])
def test_a_dedicated_tenant_neither_comes_nor_goes(field: str) -> None:
    one, other = "{isolation: dedicated, gpus: [1]}", "{isolation: dedicated, gpus: [2]}"
    other = other if field == "gpus" else "{}"
    policies = [
        parse_policy(f"version: 1\ntenants: {{a: {text}}}", check_supported=False)
        for text in (one, other)
    ]
    for old, new in (policies, policies[::-1]):
        with pytest.raises(PolicyError, match=r"tenants\.a\.gpus: found"):
            check_live(old, new)


def test_everything_else_may_change() -> None:
    old = "tenants: {a: {}, b: {}}"
    new = (
        f"admin_keys: ['{DIGEST}']\nunknown_key: c\nmetrics: {{public: true}}\n"
        "tiers: {load: always, hbm: {watermark: 9%}}\n"
        "defaults: {quota: {hbm: 10%, hard: true}, ttl: {mode: strict}, max_queued: 3}\n"
        "tenants: {b: {isolation: shared, group: g, weight: 2}, c: {reserve: {hbm: 5%}}}"
    )
    check_live(*(parse_policy(f"version: 1\n{text}") for text in (old, new)))


def test_who_is_gone() -> None:
    old = parse_policy(
        "version: 1\ntenants: {a: {}, b: {isolation: shared, group: g}, c: {},"
        " d: {isolation: shared, group: h}, e: {isolation: shared, group: h}}"
    )
    new = parse_policy(
        "version: 1\ntenants: {c: {isolation: shared, group: g}, d: {isolation: shared, group: h}}"
    )
    assert gone_tenants(old, new) == ["a", "b", "e"]
    assert gone_owners(old, new) == ["t:a", "t:c"]

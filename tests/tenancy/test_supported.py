"""A field whose feature is not built is refused, with its path; the others are not."""

import re
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.errors import PolicyError
from sglang_ext.tenancy import supported
from sglang_ext.tenancy.fields import ListOf, MapOf, Reader, Section
from sglang_ext.tenancy.loader import parse_policy
from sglang_ext.tenancy.schema import POLICY_FILE
from sglang_ext.tenancy.supported import NOT_YET, NotYet, refuse_unsupported

REFERENCE = Path(__file__).parents[2] / "docs" / "policy.md"


def nested(path: str, value: object) -> object:
    for part in reversed(path.split(".")):
        value = {"acme" if part == "*" else part: value}
    return value


def field_paths(reader: Reader[Any], path: str = "") -> list[str]:
    """Every path that the file may hold, with ``*`` for a tenant and ``[]`` for any item."""
    if isinstance(reader, MapOf):
        return field_paths(reader.item, f"{path}.*")
    if isinstance(reader, ListOf) and isinstance(reader.item, Section):
        return field_paths(reader.item, f"{path}[]")
    if isinstance(reader, Section):
        return [
            found
            for key, item in reader.fields.items()
            for found in field_paths(item, f"{path}.{key}" if path else key)
        ]
    return [path]


def documented() -> dict[str, str]:
    """Path of each field in the reference, and what its column "Supported" says."""
    rows = re.findall(r"^\| `([a-z_.*\[\]]+)` \|.*\| ([^|]+) \|$", REFERENCE.read_text(), re.M)
    return {path: supported for path, supported in rows if supported[:3] in ("now", "lat")}


def rows_for(path: str) -> list[NotYet]:
    plain = path.replace("[]", "")
    return [row for row in NOT_YET if f"{plain}.".startswith(f"{row.path}.")]


MADE_UP = (
    NotYet("tiers.tape", "the tape tier"),
    NotYet("tenants.*.sla", "more classes", frozenset({"gold", "platinum"})),
)
"""So that the way in which a release refuses what it has not is tested in one that has it all."""


@pytest.fixture
def _not_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supported, "NOT_YET", (*NOT_YET, *MADE_UP))


@pytest.mark.usefixtures("_not_yet")
@pytest.mark.parametrize(
    "row", [*NOT_YET, *MADE_UP], ids=lambda row: f"{row.path} {' '.join(row.values)}"
)
def test_every_row_is_refused(row: NotYet) -> None:
    path = row.path.replace("*", "acme")
    for value in row.values or [None, {}, 5]:
        with pytest.raises(PolicyError) as caught:
            refuse_unsupported(nested(row.path, value))
        what = f"{value} is " if row.values else ""
        expected = f"{path}: {what}not supported yet (comes with {row.feature})"
        assert str(caught.value) == expected


@pytest.mark.usefixtures("_not_yet")
def test_parser_refuses_before_it_reads_the_value() -> None:
    with pytest.raises(PolicyError) as caught:
        parse_policy("version: 1\ntiers: {tape: nonsense}")
    expected = "tiers.tape: not supported yet (comes with the tape tier)"
    assert str(caught.value) == expected


@pytest.mark.parametrize("data", [None, 5, "text", [], {"tenants": []}, {"tenants": {"a": "x"}}])
def test_any_shape_is_left_to_the_parser(data: object) -> None:
    refuse_unsupported(data)


def test_all_supported_fields_together() -> None:
    digest = "sha256:" + "a" * 64
    parse_policy(
        "version: 1\n"
        "engine: {page_size: 32, kv_cache_dtype: bf16}\n"
        f"admin_keys: ['{digest}']\n"
        "unknown_key: free\n"
        "metrics: {tenants: top 5, public: true}\n"
        "defaults: {isolation: private, sla: basic, weight: 2, quota: {hbm: 10%, hard: true}}\n"
        "tenants: {free: {api_keys: []}, hr: {isolation: shared, group: g}}\n"
    )


def test_rows_name_fields_that_exist() -> None:
    paths = [path.replace("[]", "") for path in field_paths(POLICY_FILE)]
    for row in NOT_YET:
        assert any(f"{path}.".startswith(f"{row.path}.") for path in paths), row


def test_reference_has_every_field_and_no_other() -> None:
    assert sorted(documented()) == sorted(field_paths(POLICY_FILE))


@pytest.mark.parametrize("path", field_paths(POLICY_FILE))
def test_reference_says_what_is_supported(path: str) -> None:
    said = documented()[path]
    fields = [row for row in rows_for(path) if not row.values]
    values = sorted(value for row in rows_for(path) for value in row.values)
    if fields:
        assert said == f"later: {fields[0].feature}"
    elif values:
        named = " and ".join(f"`{value}`" for value in sorted(values, reverse=True))
        assert said == f"now, but {named} later"
    else:
        assert said == "now"

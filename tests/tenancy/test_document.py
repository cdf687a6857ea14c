"""Plain data to text and back, and what people are shown of it."""

import json
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings

from sglang_ext.errors import PolicyError
from sglang_ext.tenancy.document import masked, read_json, version_of, write_yaml
from sglang_ext.tenancy.keys import digest
from sglang_ext.tenancy.loader import build_policy, parse_policy
from sglang_ext.tenancy.yaml_text import read_yaml
from tests.tenancy.documents import documents, policies


@settings(deadline=None)
@given(documents)
@example({"weight": 0.0010000000000000002})
def test_what_is_written_is_read_again(document: dict[str, Any]) -> None:
    text = write_yaml(document)
    assert read_yaml(text) == document
    assert yaml.safe_load(text) == document, "another reader of YAML sees something else"


@settings(deadline=None)
@given(documents)
def test_json_is_read_as_yaml_would_be(document: dict[str, Any]) -> None:
    assert read_json(json.dumps(document)) == document


@settings(deadline=None)
@given(policies)
def test_a_policy_survives_being_written(document: dict[str, Any]) -> None:
    assert parse_policy(write_yaml(document)) == build_policy(document)


@settings(deadline=None)
@given(policies, policies)
def test_versions_tell_documents_apart(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert (version_of(one) == version_of(other)) == (one == other)


def test_a_version_does_not_depend_on_the_order() -> None:
    assert version_of({"a": 1, "b": 2}) == version_of({"b": 2, "a": 1})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not valid JSON at line 1, column 2"),
        ('{"a": 1, "a": 2}', "a: found twice, expected once"),
        ('{"a": NaN}', "NaN is no number"),
        ("[" * 5000, "not valid JSON"),
        ("[" * 50 + "]" * 50, "nested too deeply"),
        ("9" * 5000, "a number too long"),
        ("", "not valid JSON"),
    ],
)
def test_wrong_json(text: str, problem: str) -> None:
    with pytest.raises(PolicyError, match=problem):
        read_json(text)


@settings(deadline=None)
@given(policies)
def test_no_digest_is_shown(document: dict[str, Any]) -> None:
    shown = json.dumps(masked(document))
    for tenant in document["tenants"].values():
        for key in tenant.get("api_keys", ()):
            assert key not in shown
            assert key[:15] + "..." in shown


def test_a_key_with_an_end_is_masked_too() -> None:
    key = digest("x")
    document = {"admin_keys": [{"key": key, "until": "2030-01-01T00:00:00Z"}]}
    assert masked(document)["admin_keys"][0]["key"] == key[:15] + "..."

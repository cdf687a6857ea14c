"""The part of YAML that a policy file may use."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.errors import PolicyError
from sglang_ext.tenancy.yaml_text import read_yaml

MARKS = """
a b : - ? [ ] { } , & * ! | > ' " % # ~ null true 1 1.5 1e999 .nan 2001-13-45 0b_ 190:20:30
&a *a <<: !!int !!python/name:os.system %YAML --- ... \\U7FFFFFFF \\UFFFFFFFF \\uD800 \\0
"""
SPACES = ["\n", "\n  ", "\n    ", " ", ": ", "- ", "\t", "\x00", "\ufeff", "\ud800", "\u2028"]
PIECES = st.sampled_from([*MARKS.split(), *SPACES])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("# nothing but a comment", None),
        ("a: 1", {"a": 1}),
        ("a: -1.5", {"a": -1.5}),
        ("a: 1e3", {"a": 1000.0}),
        ("a: ~\nb:\nc: null", {"a": None, "b": None, "c": None}),
        ("a: true\nb: False", {"a": True, "b": False}),
        ("a: 'true'\nb: \"1\"", {"a": "true", "b": "1"}),
        ("a: [x, {b: y}]", {"a": ["x", {"b": "y"}]}),
        ("no: yes\non: off\n1: 2", {"no": "yes", "on": "off", "1": 2}),
        ("a: 10:30\nb: 0x1F\nc: 2001-12-14", {"a": "10:30", "b": "0x1F", "c": "2001-12-14"}),
        ("<<: {a: 1}", {"<<": {"a": 1}}),
    ],
)
def test_values(text: str, value: object) -> None:
    assert read_yaml(text) == value


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [1", "not valid YAML at line 1, column 6: "),
        ("a: 1\n b: 2", "not valid YAML at line 2, column 3: "),
        ("a: &x 1\nb: *x", "not valid YAML at line 2, column 4: aliases are not allowed"),
        ("a: &x [*x]", "not valid YAML at line 1, column 8: aliases are not allowed"),
        ("a: !!int x", "not valid YAML at line 1, column 4: tags are not allowed"),
        (
            "a: !!python/name:os.system x",
            "not valid YAML at line 1, column 4: tags are not allowed",
        ),
        ("[a, b]: 1", "not valid YAML at line 1, column 1: a field's name must be text"),
        ("a: " + "[" * 100_000, "not valid YAML at line 1, column 19: nested too deeply"),
        ("a: 1\n---\nb: 2", "not valid YAML at line 2, column 1: expected a single document"),
        ("a: \x00", "not valid YAML: holds a character that YAML forbids"),
        ('a: "\\UFFFFFFFF"', "not valid YAML: a number in an escape is out of range"),
    ],
)
def test_refused(text: str, problem: str) -> None:
    with pytest.raises(PolicyError) as caught:
        read_yaml(text)
    assert caught.value.path == ""
    assert caught.value.problem.startswith(problem)


def test_field_given_twice() -> None:
    with pytest.raises(PolicyError) as caught:
        read_yaml("tenants:\n  acme: {}\n  globex: {}\n  acme: {}\n")
    assert str(caught.value) == "tenants.acme: found twice (lines 2 and 4), expected once"


def test_syntax_error_does_not_quote_the_file() -> None:
    with pytest.raises(PolicyError) as caught:
        read_yaml('api_keys: ["my-secret-key" "x"')
    assert "my-secret-key" not in str(caught.value)
    assert caught.value.__suppress_context__


@settings(deadline=None)
@given(st.text() | st.lists(PIECES, max_size=30).map("".join))
def test_any_text_is_a_value_or_a_policy_error(text: str) -> None:
    try:
        read_yaml(text)
    except PolicyError as error:
        assert error.problem

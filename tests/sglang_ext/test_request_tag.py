"""The tag in front of a cache key: it comes off as it went on, and no client can write one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.namespace import frame, is_framed
from sglang_ext.request_tag import NO_TAG, RequestTag, attach, check_session_name, detach
from sglang_ext.types import Owner

NAMES = st.from_regex(r"\A[A-Za-z0-9._:@~+=-]{0,128}\Z")
TAGS = st.builds(RequestTag, NAMES, st.none() | st.integers(1, 10**12))


@given(TAGS, st.text(), st.text())
def test_a_tag_comes_off_as_it_went_on(tag: RequestTag, client_key: str, lora: str) -> None:
    key = frame(Owner("t:a"), client_key)
    assert detach(attach(tag, key) + lora) == (tag, key + lora)
    assert attach(NO_TAG, key) == key


@given(st.text())
def test_no_key_of_a_client_is_taken_for_a_tag(client_key: str) -> None:
    key = frame(Owner("t:a"), f"#3:1/s{client_key}")
    assert is_framed(key)
    assert detach(key) == (NO_TAG, key)


def test_a_request_without_a_key_has_no_tag() -> None:
    assert detach(None) == (NO_TAG, None)


@pytest.mark.parametrize("name", ["", "a/b", "a b", "x" * 129, "é", "a\n", "#1"])
def test_a_bad_name_of_a_session_is_refused_in_words(name: str) -> None:
    with pytest.raises(ValueError, match="1 to 128"):
        check_session_name(name)


def test_a_name_may_be_what_clients_use() -> None:
    for name in ("a", "x" * 128, "550e8400-e29b-41d4-a716-446655440000", "user:7@chat~1+2=3._-"):
        assert check_session_name(name) == name

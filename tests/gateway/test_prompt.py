"""Equal beginnings have equal names, and nothing else has."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.gateway.prompt import BLOCK_BYTES, MOST_BYTES, chain_of
from sglang_ext.namespace import tenant_owner
from sglang_ext.request_tag import RequestTag
from sglang_ext.tenancy.identity import Identity
from sglang_ext.types import TenantId

KEY = b"k" * 32
A, B = (Identity(TenantId(name), tenant_owner(TenantId(name))) for name in "ab")
LONG = "".join(f"word {number}, " for number in range(1000))


def chain(body: Any, caller: Identity = A, key: bytes = KEY) -> list[bytes]:
    return chain_of(caller, json.dumps(body).encode(), key)


def common(one: list[bytes], two: list[bytes]) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(one, two, strict=False)) if a != b),
        min(len(one), len(two)),
    )


@given(same=st.integers(0, 6000), one=st.text(max_size=3000), two=st.text(max_size=3000))
def test_the_common_beginning_is_found_to_the_block(same: int, one: str, two: str) -> None:
    first, second = (LONG[:same] + rest for rest in (one, two))
    found = common(chain({"text": first}), chain({"text": second}))
    data = [text.encode() for text in (first, second)]
    equal = next(
        (n for n, (a, b) in enumerate(zip(*data, strict=False)) if a != b), min(map(len, data))
    )
    assert found == equal // BLOCK_BYTES


def test_the_next_turn_continues_the_one_before() -> None:
    turns = [{"role": "user", "content": LONG}, {"role": "assistant", "content": LONG}]
    after = [*turns, {"role": "user", "content": "And then?"}]
    for name, other in (("messages", {"system": LONG}), ("input", {"instructions": "Be brief."})):
        before = chain({name: turns, **other})
        # The fields may come in any order, and what is no text may change.
        assert (
            chain({"temperature": 1, **other, name: after, "model": None})[: len(before)] == before
        )


def test_token_ids_are_text_too() -> None:
    ids = list(range(2000))
    short, long = chain({"input_ids": ids}), chain({"input_ids": [*ids, 7]})
    assert len(short) > 5
    assert common(short, long) == len(short)


@pytest.mark.trial(14)
def test_no_two_owners_have_a_name_in_common() -> None:
    one, two = chain({"text": LONG}), chain({"text": LONG}, B)
    assert len(one) == len(two) > 5
    assert not set(one) & set(two)


@pytest.mark.parametrize("field", ["model", "lora_path", "extra_key", "cache_salt"])
def test_where_pages_differ_names_differ(field: str) -> None:
    plain, other = chain({"text": LONG}), chain({"text": LONG, field: "x"})
    assert not set(plain) & set(other)
    assert other == chain({field: "x", "text": LONG})
    assert other != chain({field: "y", "text": LONG})


def test_names_need_the_key() -> None:
    assert not set(chain({"text": LONG})) & set(chain({"text": LONG}, key=b"x" * 32))


def test_what_leaves_no_pages_has_no_names() -> None:
    assert chain({"text": LONG}, replace(A, no_store=True)) == []
    assert chain({"text": LONG}, replace(A, tag=RequestTag("", 500))) == []
    assert chain({"text": "short"}) == []
    assert chain_of(A, b" " * (MOST_BYTES + 1), KEY) == []


def test_there_are_not_more_names_than_256() -> None:
    assert len(chain({"text": "x" * (MOST_BYTES - 100)})) == 256


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
FIELDS = st.sampled_from(["text", "messages", "prompt", "input_ids", "tools", "model", "input"])


@given(body=JSON | st.dictionaries(FIELDS, JSON))
def test_any_json_is_taken(body: Any) -> None:
    assert chain(body) == chain(body)


@given(body=st.binary(max_size=50))
def test_any_bytes_are_taken(body: bytes) -> None:
    assert chain_of(A, body, KEY) == []


def test_what_no_parser_takes_is_left_to_the_engine() -> None:
    assert chain_of(A, b"[" * 100_000, KEY) == []
    assert chain_of(A, b'{"text": "' + b"\\ud800" * 1000 + b'"}', KEY) == []
    assert chain_of(A, b'{"text": ' + b"9" * 10_000 + b"}", KEY) == []

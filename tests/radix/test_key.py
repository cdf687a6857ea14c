"""Where a key's text turns private, and that nothing compares or looks up across that line."""

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_ext.namespace import SYSTEM_OWNER, frame
from sglang_ext.radix.key import SYSTEM_NAMESPACE, TenantKey, own
from sglang_ext.radix.public import PublicPrefixes
from sglang_ext.types import PUBLIC, Owner

PAGE = 4
PROMPT = [7, 7, 7, 7, 8, 8, 8, 8]
ACME = frame(Owner("t:acme"))
PREFIXES = PublicPrefixes([PROMPT], PAGE)


def make_key(tokens: list[int], extra_key: str | None = ACME, **changes: Any) -> TenantKey:
    return own(RadixKey(array("q", tokens), extra_key, **changes), PREFIXES)


def test_a_key_is_public_as_far_as_it_repeats_a_prompt_in_whole_pages() -> None:
    assert make_key(PROMPT + [1] * 4).public == 8
    assert make_key([7, 7, 7, 7, 8, 8, 1, 1]).public == 4
    assert make_key([7, 7, 1, 1]).public == 0


def test_public_pages_are_looked_up_without_a_namespace_and_private_ones_with_it() -> None:
    key = make_key(PROMPT + [1] * 4, cache_salt="salt")
    assert key.child_key_at(0, PAGE) == (7, 7, 7, 7)
    assert key.child_key_at(4, PAGE) == (8, 8, 8, 8)
    assert key.child_key_at(8, PAGE) == ((ACME, "salt"), (1, 1, 1, 1))


def test_a_slice_carries_the_rest_of_the_boundary() -> None:
    key = make_key(PROMPT + [1] * 4)
    tail = key[4:]
    assert (tail.public, tail.owner, tail.extra_key) == (4, "t:acme", ACME)
    head = key[:8]
    assert (head.owner, head.extra_key, head.cache_salt) == (PUBLIC, None, None)
    private = key[8:]
    assert (private.public, private.owner, private.extra_key) == (0, "t:acme", ACME)


def test_an_entirely_public_key_has_the_public_namespace() -> None:
    key = make_key(PROMPT, cache_salt="salt")
    assert (key.owner, key.extra_key, key.cache_salt) == (PUBLIC, None, None)


@pytest.mark.parametrize("extra_key", [None, ""])
def test_no_namespace_means_the_system_tenant_and_not_public(extra_key: str | None) -> None:
    key = make_key([1] * 4, extra_key)
    assert (key.owner, key.extra_key) == (SYSTEM_OWNER, SYSTEM_NAMESPACE)
    assert key.child_key_at(0, PAGE) != (1, 1, 1, 1)


@pytest.mark.parametrize("extra_key", [ACME + "adapter-7", "adapter-7"])
def test_a_key_that_may_carry_an_adapter_shares_nothing(extra_key: str) -> None:
    assert make_key(PROMPT + [1] * 4, extra_key).public == 0


def test_a_sealed_owner_shares_not_even_public_text() -> None:
    key = make_key(PROMPT + [1] * 4, frame(Owner("s:bank")))
    assert (key.public, key.owner) == (0, "s:bank")
    assert key.child_key_at(0, PAGE) == (key.extra_key, (7, 7, 7, 7))


def test_a_match_never_crosses_the_boundary_of_either_key() -> None:
    node = make_key(PROMPT)
    narrower = make_key(PROMPT + [1] * 4)
    narrower.public = 4
    assert node.match_at(narrower, 0, PAGE) == 4


def test_private_runs_of_two_owners_cannot_be_compared() -> None:
    mine, theirs = make_key([1] * 4), make_key([1] * 4, frame(Owner("t:globex")))
    with pytest.raises(ValueError, match="extra_key"):
        mine.match_at(theirs, 0, PAGE)


def test_a_salt_divides_the_private_part_only() -> None:
    plain, salted = make_key(PROMPT + [1] * 4), make_key(PROMPT + [1] * 4, cache_salt="s")
    assert plain.child_key_at(0, PAGE) == salted.child_key_at(0, PAGE)
    assert plain.child_key_at(8, PAGE) != salted.child_key_at(8, PAGE)
    with pytest.raises(ValueError, match="cache_salt"):
        plain[8:].match_at(salted[8:], 0, PAGE)


def test_a_bigram_is_public_only_when_both_of_its_tokens_are() -> None:
    key = own(RadixKey(array("q", PROMPT + [1] * 5), ACME), PREFIXES, bigram=True)
    assert (len(key), key.public) == (12, 4)
    assert key[:4].owner == PUBLIC
    assert list(key[4:8]) == [(8, 8), (8, 8), (8, 8), (8, 1)]
    assert key[4:8].owner == "t:acme"


def test_a_limit_caps_the_text() -> None:
    key = make_key(PROMPT + [1] * 8, limit=10)
    assert len(key) == 10
    assert len(key.page_aligned(PAGE)) == 8
    assert key.page_aligned(PAGE).owner == PUBLIC


def test_owning_twice_changes_nothing() -> None:
    key = make_key(PROMPT + [1] * 4)
    assert own(key, PublicPrefixes([], PAGE)) is key


@given(st.lists(st.integers(7, 9), max_size=20), st.booleans(), st.data())
def test_slices_agree_with_sglangs_own(tokens: list[int], bigram: bool, data: Any) -> None:
    stock = RadixKey(array("q", tokens), ACME, is_bigram=bigram)
    key = own(stock, PREFIXES)
    start = data.draw(st.integers(0, len(stock)))
    stop = data.draw(st.integers(start, len(stock)))
    piece, expected = key[start:stop], stock[start:stop]
    assert (len(key), list(key)) == (len(stock), list(stock))
    assert (len(piece), list(piece)) == (len(expected), list(expected))
    assert piece.public == key.public - start


@given(st.lists(st.integers(7, 8), max_size=30), st.booleans(), st.sampled_from([1, 4]), st.data())
def test_matches_and_child_keys_agree_with_sglangs_own(
    tokens: list[int], bigram: bool, page: int, data: Any
) -> None:
    text, salt = array("q", tokens), data.draw(st.sampled_from([None, "salt"]))
    stock = RadixKey(text, ACME, is_bigram=bigram, cache_salt=salt)
    start = data.draw(st.integers(0, len(stock)))
    other = array("q", tokens[start:] + data.draw(st.lists(st.integers(7, 8), max_size=9)))
    stock_node = RadixKey(other, ACME, is_bigram=bigram, cache_salt=salt)
    nothing = PublicPrefixes([], page)
    key, node = own(stock, nothing), own(stock_node, nothing)
    assert node.match_at(key, start, page) == stock_node.match_at(stock, start, page)
    if start + page <= len(stock):
        assert key.child_key_at(start, page) == stock.child_key_at(start, page)


def test_only_whole_pages_enter_and_their_storage_is_shared() -> None:
    text = array("q", [1] * 8)
    whole = own(RadixKey(text, ACME), PREFIXES, page_size=PAGE)
    assert whole.token_ids is text and whole.page_aligned(PAGE) is whole
    assert len(own(RadixKey(array("q", [1] * 7), ACME), PREFIXES, page_size=PAGE)) == 4
    assert own(RadixKey(array("q", PROMPT + [1]), ACME), PREFIXES, page_size=PAGE).owner == PUBLIC

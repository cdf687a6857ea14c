"""The boundary against the plain definition: the longest common prefix, in whole pages."""

from array import array
from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.radix.public import PublicPrefixes, common_length

TOKENS = st.lists(st.integers(1, 2), max_size=24)


@given(st.lists(TOKENS, max_size=4), TOKENS, st.sampled_from([1, 4]), st.booleans())
def test_the_boundary_is_the_longest_common_prefix_in_whole_pages(
    prefixes: list[list[int]], text: list[int], page: int, bigram: bool
) -> None:
    shared = max((common(text, prefix) for prefix in prefixes), default=0)
    units = max(shared - bigram, 0)
    found = PublicPrefixes(prefixes, page).boundary(array("q", text), bigram)
    # A bigram needs one token more than the page that the lookup begins with.
    assert found == units // page * page


def test_prefixes_shorter_than_a_page_are_left_out() -> None:
    assert not PublicPrefixes([[1, 2, 3]], 4)
    assert PublicPrefixes([[1, 2, 3, 4]], 4)


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 9))
def test_the_common_length_is_found_in_any_window(agreed: int, rest: int, offset: int) -> None:
    left = array("q", [1] * agreed + [2] * rest)
    right = array("q", [0] * offset + [1] * agreed + [3] * rest)
    assert common_length(left, right, offset=offset) == agreed
    assert common_length(left, right, agreed // 2, offset) == agreed // 2


def common(left: list[int], right: list[int]) -> int:
    pairs = zip(left, right, strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))

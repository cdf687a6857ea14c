"""Pages computed again, against a model that remembers everything."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.observe.ghosts import GhostPages

_PROMPTS = st.tuples(
    st.sampled_from(["t:a", "t:b"]), st.lists(st.integers(0, 2), max_size=14), st.integers(0, 14)
)


def _expected(seen: set[tuple[str, tuple[int, ...]]], prompt: tuple[str, list[int], int]) -> int:
    """Return the tokens computed again in pages of 4, and remember the prompt."""
    namespace, tokens, cached = prompt
    ends = range(4, len(tokens), 4)
    pages = [(namespace, tuple(tokens[:end])) for end in ends if end - 4 >= cached]
    again = sum(page in seen for page in pages)
    seen.update(pages)
    return 4 * again


@given(st.lists(_PROMPTS, max_size=12))
def test_as_many_as_a_full_memory_would_say(prompts: list[tuple[str, list[int], int]]) -> None:
    ghosts, seen = GhostPages(), set[tuple[str, tuple[int, ...]]]()
    for prompt in prompts:
        namespace, tokens, cached = prompt
        expected = _expected(seen, prompt)
        assert ghosts.computed(namespace, array("q", tokens), cached, 4).again == expected


def test_the_memory_only_forgets() -> None:
    ghosts = GhostPages(slots=64)
    texts = [array("q", range(start, start + 161)) for start in range(0, 100_000, 1000)]
    assert sum(ghosts.computed("t:a", text, 0, 16).again for text in texts) == 0
    last = ghosts.computed("t:a", texts[-1], 0, 16).again
    assert 0 < last <= 160
    assert ghosts.computed("t:a", texts[0], 0, 16).again < 160


def test_idle_is_the_time_since_the_last_use_whether_cached_or_computed() -> None:
    times = iter([100, 100, 107, 127, 128])
    ghosts = GhostPages(clock=lambda: next(times))
    short, long = array("q", range(33)), array("q", range(65))
    prompts = ((short, 0), (long, 32), (long, 64), (short, 0))
    seen = [ghosts.computed("t:a", text, cached, 16) for text, cached in prompts]
    assert [one.idle.tolist() for one in seen] == [[], [7, 7], [20] * 4, [1, 1]]
    assert [one.again for one in seen] == [0, 0, 0, 32]

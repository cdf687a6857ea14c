"""Conversations stay on their rank, memory fills evenly, and no owner's text counts for another."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.rank_router import RankRouter
from sglang_ext.types import Owner

IDLE = {0: 0, 1: 0}
A, B = Owner("t:a"), Owner("t:b")
TOKENS = 32


def text(number: int, blocks: int) -> list[int]:
    return [number * 10_000 + place for place in range(blocks * TOKENS)]


@given(
    turns=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40), st.integers(0, 9))),
    ranks=st.integers(1, 4),
)
def test_a_conversation_stays_whatever_happens(
    turns: list[tuple[int, int, int]], ranks: int
) -> None:
    router = RankRouter(100_000)
    homes: dict[int, int] = {}
    for session, blocks, busy in turns:
        in_flight = {rank: busy * (rank == homes.get(session)) for rank in range(ranks)}
        rank = router.choose(A, f"chat-{session}", "", text(session, blocks), in_flight)
        assert homes.setdefault(session, rank) == rank


def test_a_conversation_whose_rank_is_gone_gets_another() -> None:
    router = RankRouter(100_000)
    first = router.choose(A, "chat", "", text(1, 4), IDLE)
    left = 1 - first
    assert router.choose(A, "chat", "", text(1, 4), {left: 99}) == left
    assert router.choose(A, "chat", "", text(1, 4), IDLE) == left


@pytest.mark.parametrize("seed", range(5))
def test_memory_of_two_ranks_fills_evenly(seed: int, ranks: int = 2) -> None:
    """Conversations that begin with very different texts and go on, and the same in round robin."""
    drawn = random.Random(seed)
    router = RankRouter(10**9)
    lengths: Counter[int] = Counter()
    ours: Counter[int] = Counter()
    theirs: Counter[int] = Counter()
    seen: Counter[tuple[int, int]] = Counter()
    for turn in range(1500):
        session = drawn.randrange(300)
        before = lengths[session]
        lengths[session] += drawn.choice((1, 2, 4) if before else (1, 2, 4, 60))
        blocks = lengths[session]
        idle = dict.fromkeys(range(ranks), 0)
        ours[router.choose(A, f"{session}", "", text(session, blocks), idle)] += blocks - before
        other = turn % ranks
        theirs[other] += blocks - seen[session, other]
        seen[session, other] = blocks
    mean = ours.total() / ranks
    assert max(ours.values()) / mean < 1.05
    assert theirs.total() > 1.5 * ours.total(), "in turns, each rank computes and holds it again"


def test_a_prompt_goes_where_its_beginning_is() -> None:
    router = RankRouter(10**6)
    rank = router.choose(A, "", "", text(1, 10), IDLE)
    for _ in range(4):
        assert router.choose(A, "", "", [*text(1, 10), 1, 2, 3], IDLE) == rank
    assert router.choose(A, "", "other", text(1, 10), IDLE) != rank


@pytest.mark.trial(14)
def test_what_another_owner_has_attracts_nobody() -> None:
    router, fresh = RankRouter(10**6), RankRouter(10**6)
    for one in (router, fresh):
        assert one.choose(A, "", "", text(1, 10), IDLE) == 0
        assert one.choose(A, "", "", text(2, 10), IDLE) == 1
        assert one.choose(A, "", "", text(3, 10), IDLE) == 0
    # Rank 0 holds more; for A's own text that is worth it, for B's equal text it is not.
    assert router.choose(A, "", "", text(1, 10), IDLE) == 0
    assert fresh.choose(B, "", "", text(1, 10), IDLE) == 1


def test_a_busy_rank_gets_less() -> None:
    router = RankRouter(10**6)
    assert [router.choose(A, "", "", [1, 2], {0: 3, 1: busy}) for busy in (0, 2, 4)] == [1, 1, 0]


def test_a_full_memory_is_no_reason_any_more() -> None:
    """When each rank has what fits, text is known as far as it may still be there."""
    router = RankRouter(20 * TOKENS)
    for number in range(50):
        router.choose(A, "", "", text(number, 4), IDLE)
    assert sum(router._index.held(str(rank)) for rank in IDLE) == 20
    rank = router.choose(A, "", "", text(99, 4), IDLE)
    assert router.choose(A, "", "", text(99, 4), IDLE) == rank

"""The reference workload: seeded, of the shape that it says, and of a known size."""

from collections import Counter, defaultdict
from statistics import mean

import pytest

from sglang_ext.plan.workload import RagShape, RagTraffic, distinct_tokens, rag_turns

_SHAPE = RagShape()
_TRAFFIC = RagTraffic(conversations=400)


def test_a_seed_names_one_workload() -> None:
    assert rag_turns(_SHAPE, _TRAFFIC, 1) == rag_turns(_SHAPE, _TRAFFIC, 1)
    assert rag_turns(_SHAPE, _TRAFFIC, 1) != rag_turns(_SHAPE, _TRAFFIC, 2)


def test_lengths_are_those_of_the_reference() -> None:
    turns = rag_turns(_SHAPE, _TRAFFIC, 0)
    assert mean(Counter(turn.conversation for turn in turns).values()) == pytest.approx(6, rel=0.1)
    for turn in turns:
        expected = 200 + (9_500 if turn.number == 0 else 0)
        assert sum(piece.tokens for piece in turn.new) == expected


def test_turns_come_in_order_and_each_after_the_one_before() -> None:
    turns = rag_turns(_SHAPE, _TRAFFIC, 0)
    assert [turn.at for turn in turns] == sorted(turn.at for turn in turns)
    numbers: dict[int, int] = defaultdict(int)
    for turn in turns:
        assert turn.number == numbers[turn.conversation]
        numbers[turn.conversation] += 1


def test_tenants_have_zipf_sizes_and_share_nothing() -> None:
    turns = rag_turns(_SHAPE, _TRAFFIC, 0)
    sizes = Counter(turn.tenant for turn in turns if turn.number == 0)
    assert sizes["t0"] > 1.4 * sizes["t1"] > sizes["t5"]
    owners = defaultdict(set)
    for turn in turns:
        for piece in turn.new:
            owners[piece.name].add(turn.tenant)
    assert all(len(tenants) == 1 for tenants in owners.values())


def test_distinct_tokens_counts_a_shared_beginning_once() -> None:
    shape = RagShape(system=10, context=4, documents=1, question=3, answer=2, turns=(1, 1))
    alone = RagTraffic(conversations=2, tenants=1, documents=1)
    assert distinct_tokens(rag_turns(shape, alone, 0)) == 10 + 4 + 2 * (3 + 2)


def test_scaling_scales_every_length() -> None:
    small = RagShape().scaled(0.125)
    assert (small.system, small.context, small.question, small.answer) == (188, 1_000, 25, 25)

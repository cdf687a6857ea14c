"""The index knows what was sent, for each owner apart, within its bounds."""

from collections import defaultdict
from collections.abc import Iterable
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_ext.gateway.prefix_index import PrefixIndex
from sglang_ext.types import Owner

OWNERS = st.sampled_from(["t:a", "t:b", "g:team"]).map(Owner)
ENGINES = ("one", "two", "three")
TEXTS = st.text("xy", max_size=6)


def chain(text: str) -> list[bytes]:
    """A block a letter; as in a real chain, its name stands for all before it."""
    return [text[:end].encode() for end in range(1, len(text) + 1)]


class AgainstAModel(RuleBasedStateMachine):
    """The model remembers every text that was sent, and looks through all of them."""

    most = 2**16

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(self.most)
        self.sent: dict[tuple[Owner, str], list[str]] = defaultdict(list)

    @rule(owner=OWNERS, text=TEXTS, engine=st.sampled_from(ENGINES))
    def learn(self, owner: Owner, text: str, engine: str) -> None:
        self.index.learn(owner, chain(text), engine)
        self.sent[owner, engine].append(text)

    @rule(engine=st.sampled_from(ENGINES))
    def forget_engine(self, engine: str) -> None:
        self.index.forget_engine(engine)
        self._drop(key for key in self.sent if key[1] == engine)

    @rule(owner=OWNERS)
    def forget_owner(self, owner: Owner) -> None:
        self.index.forget_owner(owner)
        self._drop(key for key in self.sent if key[0] == owner)

    def _drop(self, keys: Iterable[tuple[Owner, str]]) -> None:
        for key in list(keys):
            del self.sent[key]

    @rule()
    def clear(self) -> None:
        self.index.clear()
        self.sent.clear()
        assert len(self.index) == 0

    @rule(owner=OWNERS, text=TEXTS, engines=st.sets(st.sampled_from(ENGINES)))
    def matched(self, owner: Owner, text: str, engines: set[str]) -> None:
        found = self.index.matched(owner, chain(text), engines)
        expected = {name: self._longest(owner, text, name) for name in engines}
        self.compare(found, {name: count for name, count in expected.items() if count})

    def compare(self, found: dict[str, int], expected: dict[str, int]) -> None:
        assert found == expected

    def _longest(self, owner: Owner, text: str, engine: str) -> int:
        common = (_common(text, sent) for sent in self.sent[owner, engine])
        return max(common, default=0)

    @invariant()
    def is_bounded(self) -> None:
        assert len(self.index) <= self.most


def _common(one: str, two: str) -> int:
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False))
    return sum(1 for _ in pairs)


class Bounded(AgainstAModel):
    """With little room it knows less, and never what was not sent."""

    most = 7

    def compare(self, found: dict[str, int], expected: dict[str, int]) -> None:
        assert found.keys() <= expected.keys()
        assert all(count <= expected[name] for name, count in found.items())


TestAgainstAModel = AgainstAModel.TestCase
TestBounded = Bounded.TestCase


@pytest.mark.trial(14)
@given(texts=st.lists(TEXTS, max_size=8), asked=TEXTS)
def test_what_one_owner_sent_is_warm_for_no_other(texts: list[str], asked: str) -> None:
    index = PrefixIndex()
    for text in [*texts, asked]:
        index.learn(Owner("t:a"), chain(text), "one")
    assert index.matched(Owner("t:b"), chain(asked), ENGINES) == {}
    assert index.matched(Owner("t:a"), chain(asked), ENGINES) == (
        {"one": len(asked)} if asked else {}
    )


def test_a_flood_of_one_owner_takes_no_room_of_another() -> None:
    index = PrefixIndex(100)
    index.learn(Owner("t:b"), chain("x" * 40), "one")
    for number in range(1000):
        index.learn(Owner("t:a"), chain(f"{number:04d}" * 5), "one")
    assert index.matched(Owner("t:b"), chain("x" * 40), ["one"]) == {"one": 40}
    assert len(index) == 100


def test_the_end_of_a_text_goes_before_its_beginning() -> None:
    index = PrefixIndex(10)
    index.learn(Owner("t:a"), chain("x" * 10), "one")
    index.learn(Owner("t:a"), chain("yyyy"), "one")
    assert index.matched(Owner("t:a"), chain("x" * 10), ["one"]) == {"one": 6}
    assert index.matched(Owner("t:a"), chain("yyyy"), ["one"]) == {"one": 4}


def test_a_text_longer_than_all_room_leaves_its_beginning() -> None:
    index = PrefixIndex(10)
    index.learn(Owner("t:a"), chain("x" * 50), "one")
    assert index.matched(Owner("t:a"), chain("x" * 50), ["one"]) == {"one": 10}
    assert len(index) == 10

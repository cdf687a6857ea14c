"""The tree against the naive dictionary, over random mixed operations of several owners.

Trials 80 (a split node under the wrong key) and 81 (a split that refreshes its suffix): every match
is compared with the dictionary, and every victim must be the leaf that was used least recently.
"""

from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.radix.caches import make_rig
from tests.radix.texts import Text, Texts
from tests.radix.world import World

SPACES = ["t:a|", "t:b|", "t:b|salt", "g:c|"]
STEPS = 17_000


def make_public(page_size: int) -> list[Text]:
    """Two prompts with a common beginning, and one that ends inside a page."""
    return [
        (100,) * (3 * page_size) + (101,) * page_size,
        (100,) * (3 * page_size) + (102,) * page_size,
        (200,) * (2 * page_size) + (3,) * (page_size // 2),
    ]


def make_world(page_size: int, with_public: bool) -> World:
    public = make_public(page_size) if with_public else []
    rig = make_rig(40 * page_size, page_size, [list(text) for text in public])
    return World(rig, public)


@pytest.mark.parametrize("with_public", [False, True])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_trial_80_mixed_operations_match_a_naive_dictionary(
    page_size: int, with_public: bool
) -> None:
    """Six runs of 17,000 operations: 102,000 in all, integrity after each."""
    world = make_world(page_size, with_public)
    texts = Texts(page_size, world.public, SPACES)
    random = Random(f"{page_size} {with_public}")
    for _ in range(STEPS):
        world.random_step(random, texts)
        world.check()
    assert len(world.victims) > 1000, "the pool was too large for the test to mean anything"


class TreeMachine(RuleBasedStateMachine):
    """The same operations chosen by Hypothesis, which shrinks what it finds."""

    @initialize(page_size=st.sampled_from([1, 16]), with_public=st.booleans())
    def start(self, page_size: int, with_public: bool) -> None:
        self.world = make_world(page_size, with_public)
        self.texts = Texts(page_size, self.world.public, SPACES)

    def draw(self, seed: int, choice: int) -> tuple[Text, str]:
        self.world.begin()
        return self.texts.draw(Random(seed)), SPACES[choice]

    @rule(
        kind=st.sampled_from(["match", "hold", "back_up", "demote", "load_back", "prefetch"]),
        **{"seed": st.integers(0, 60), "choice": st.integers(0, len(SPACES) - 1)},
    )
    def without_room(self, kind: str, seed: int, choice: int) -> None:
        getattr(self.world, kind)(*self.draw(seed, choice))

    @rule(
        kind=st.sampled_from(["insert", "insert_blind", "abort"]),
        seed=st.integers(0, 60),
        choice=st.integers(0, len(SPACES) - 1),
    )
    def with_room(self, kind: str, seed: int, choice: int) -> None:
        text, space = self.draw(seed, choice)
        if len(text) <= self.world.room():
            getattr(self.world, kind)(text, space)

    @rule(pages=st.integers(1, 8), kind=st.sampled_from(["evict", "evict_host"]))
    def shrink(self, pages: int, kind: str) -> None:
        self.world.begin()
        getattr(self.world, kind)(pages * self.world.page_size)

    @rule(index=st.integers(0, 10))
    def release(self, index: int) -> None:
        self.world.release(index)

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "world"):
            self.world.check()


TestTreeMachine: Any = TreeMachine.TestCase
TestTreeMachine.settings = settings(
    max_examples=120,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)

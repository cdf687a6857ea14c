"""The reference workload: chat over retrieved documents, as lengths and names, without any text.

A prompt is a tenant's system prompt, the documents that were retrieved for the conversation, and
the turns so far. Every piece has a name, and pieces of one name hold the same tokens, so that
whoever plays the workload decides what a token is. Tenants have Zipf sizes, and their documents a
Zipf popularity; documents lie in the prompt in the order they were drawn, as a ranking puts them.
Tenants share no piece: what one of them finds in a cache, it computed itself.

Lengths that are not published: an answer has 200 tokens, and 8,000 tokens of context are 4
documents. Times are in units of the mean time between two requests of all tenants: a turn mostly
follows the one before after a short think time, and now and then after a long idle gap.
"""

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

__all__ = ["Piece", "RagShape", "RagTraffic", "Turn", "distinct_tokens", "rag_turns"]


class Piece(NamedTuple):
    """Tokens of a prompt that belong together; two of one name are equal."""

    name: str
    tokens: int


class Turn(NamedTuple):
    """One request: what its prompt adds to the prompt and answer of the turn before."""

    at: float
    tenant: str
    conversation: int
    number: int
    new: tuple[Piece, ...]
    answer: int


@dataclass(frozen=True, kw_only=True)
class RagShape:
    """Lengths in tokens, and how many turns a conversation has, drawn evenly from a range."""

    system: int = 1_500
    context: int = 8_000
    documents: int = 4
    question: int = 200
    answer: int = 200
    turns: tuple[int, int] = (2, 10)

    def scaled(self, factor: float) -> "RagShape":
        """Return the same conversation with every length times ``factor``."""
        return replace(
            self,
            system=max(1, round(self.system * factor)),
            context=max(self.documents, round(self.context * factor)),
            question=max(1, round(self.question * factor)),
            answer=max(1, round(self.answer * factor)),
        )


@dataclass(frozen=True, kw_only=True)
class RagTraffic:
    """Who talks how often. ``think`` and ``idle`` are mean gaps, see the top of this file."""

    conversations: int
    tenants: int = 6
    documents: int = 40
    """The pool of each tenant."""
    skew: float = 1.0
    """Exponent of both Zipf laws."""
    think: float = 5.0
    idle: float = 80.0
    idle_share: float = 0.25


def rag_turns(shape: RagShape, traffic: RagTraffic, seed: int) -> list[Turn]:
    """Return all turns in the order of their times; the same seed gives the same turns."""
    draw = random.Random(f"rag/{seed}")
    tenants = [f"t{number}" for number in range(traffic.tenants)]
    sizes = _zipf(traffic.tenants, traffic.skew)
    horizon = traffic.conversations * sum(shape.turns) / 2
    turns: list[Turn] = []
    for conversation in range(traffic.conversations):
        (tenant,) = draw.choices(tenants, sizes)
        start = draw.uniform(0, horizon)
        turns += _conversation(shape, traffic, draw, tenant, conversation, start)
    return sorted(turns)


def distinct_tokens(turns: Iterable[Turn]) -> int:
    """Return how many tokens of KV a cache would hold that never forgets: the working set."""
    paths: dict[int, tuple[str, ...]] = {}
    seen: dict[tuple[str, ...], int] = {}
    for turn in turns:
        path = paths.get(turn.conversation, (turn.tenant,))
        answer = Piece(f"answer/{turn.conversation}/{turn.number}", turn.answer)
        for piece in (*turn.new, answer):
            path = (*path, piece.name)
            seen[path] = piece.tokens
        paths[turn.conversation] = path
    return sum(seen.values())


def _zipf(count: int, skew: float) -> list[float]:
    return [1 / rank**skew for rank in range(1, count + 1)]


def _conversation(
    shape: RagShape,
    traffic: RagTraffic,
    draw: random.Random,
    tenant: str,
    conversation: int,
    start: float,
) -> Iterator[Turn]:
    at = start
    length = shape.context // shape.documents
    retrieved = _retrieve(draw, traffic, shape.documents)
    opening = [Piece(f"system/{tenant}", shape.system)]
    opening += [Piece(f"document/{tenant}/{number}", length) for number in retrieved]
    for number in range(draw.randint(*shape.turns)):
        question = Piece(f"question/{conversation}/{number}", shape.question)
        new = (*opening, question) if number == 0 else (question,)
        yield Turn(at, tenant, conversation, number, new, shape.answer)
        mean = traffic.idle if draw.random() < traffic.idle_share else traffic.think
        at += draw.expovariate(1 / mean)


def _retrieve(draw: random.Random, traffic: RagTraffic, count: int) -> Sequence[int]:
    """Draw ``count`` different documents, popular ones more often."""
    popularity = _zipf(traffic.documents, traffic.skew)
    cumulative = list(itertools.accumulate(popularity))
    found: dict[int, None] = {}
    while len(found) < count:
        (number,) = draw.choices(range(traffic.documents), cum_weights=cumulative)
        found[number] = None
    return list(found)

"""What the simulator plays: requests whose prompt is a row of blocks, named by their content.

A block's name stands for its tokens and all before it, so that two prompts share blocks exactly as
far as they are equal. The last block of a prompt may be partly filled.
"""

import csv
import json
from array import array
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from sglang_ext.errors import PlanError
from sglang_ext.plan.workload import Piece, Turn

__all__ = ["PlanRequest", "azure_requests", "mooncake_requests", "rag_requests"]

MOONCAKE_BLOCK_TOKENS = 512


class PlanRequest(NamedTuple):
    """One request: arrival in seconds, ``blocks`` of its prompt, and what it adds to them."""

    at: float
    tenant: str
    conversation: int
    blocks: "array[int]"
    prompt: int
    """Tokens."""
    answer: int
    answer_blocks: "array[int]"
    """Whole blocks of prompt and answer together that come after those of the prompt."""


def rag_requests(turns: Iterable[Turn], rate: float, block: int) -> Iterator[PlanRequest]:
    """Yield the turns of a workload at ``rate`` requests a second, in blocks of ``block`` tokens.

    Every length should be a multiple of ``block``; a shorter rest of a piece is dropped.
    """
    names = _Names()
    texts: dict[int, array[int]] = {}
    for turn in turns:
        text = texts.setdefault(turn.conversation, array("q"))
        for piece in turn.new:
            text.extend(names.of(text, piece, block))
        blocks = text[:]
        answer = Piece(f"answer/{turn.conversation}/{turn.number}", turn.answer)
        text.extend(names.of(text, answer, block))
        yield PlanRequest(
            at=turn.at / rate,
            tenant=turn.tenant,
            conversation=turn.conversation,
            blocks=blocks,
            prompt=len(blocks) * block,
            answer=turn.answer,
            answer_blocks=text[len(blocks) :],
        )


class _Names:
    """Numbers blocks: a piece behind equal text has the same numbers, all others have new ones."""

    def __init__(self) -> None:
        self._first: dict[tuple[int, str], int] = {}
        self._next = 0

    def of(self, text: "array[int]", piece: Piece, block: int) -> range:
        """Return the numbers of a piece's whole blocks where it comes behind ``text``."""
        place, count = (text[-1] if text else -1, piece.name), piece.tokens // block
        first = self._first.setdefault(place, self._next)
        if first == self._next:
            self._next += count
        return range(first, first + count)


def mooncake_requests(path: Path, tenants: int = 1) -> Iterator[PlanRequest]:
    """Yield a Mooncake trace: JSON lines with milliseconds, lengths and block hashes of 512 tokens.

    It has no tenants and no conversations: each request comes at its time, and belongs to the
    tenant that its second block names, modulo ``tenants`` (the first is the same system prompt
    everywhere), so that requests that share more than that are one tenant's. Raises PlanError for
    another file.
    """
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                yield _mooncake(json.loads(line), number, tenants)
            except (ValueError, KeyError, TypeError) as error:
                problem = f"{path}:{number}: no request of a Mooncake trace ({error!r})"
                raise PlanError(problem) from None


def _mooncake(row: dict[str, Any], number: int, tenants: int) -> PlanRequest:
    blocks = array("q", row["hash_ids"])
    mark = blocks[min(1, len(blocks) - 1)] if blocks else 0
    return PlanRequest(
        at=float(row["timestamp"]) / 1e3,
        tenant=f"t{mark % tenants}",
        conversation=number,
        blocks=blocks,
        prompt=int(row["input_length"]),
        answer=int(row["output_length"]),
        answer_blocks=array("q"),
    )


def azure_requests(path: Path, turns: Iterable[Turn], block: int) -> Iterator[PlanRequest]:
    """Yield the turns of a workload at the arrivals of an Azure trace, as many as it has.

    The trace says when requests came and how long they were, not what they shared: arrivals and
    lengths of answers are its own, prompts those of the workload.
    """
    arrivals = _azure_arrivals(path)
    for request, (at, answer) in zip(rag_requests(turns, 1.0, block), arrivals, strict=False):
        yield request._replace(at=at, answer=answer)


def _azure_arrivals(path: Path) -> Iterator[tuple[float, int]]:
    with path.open(encoding="utf-8", newline="") as file:
        first: datetime | None = None
        for row in csv.DictReader(file):
            try:
                at = datetime.fromisoformat(row["TIMESTAMP"][:26])
                answer = max(1, int(row["GeneratedTokens"]))
            except (KeyError, ValueError, TypeError) as error:
                raise PlanError(f"{path}: no row of an Azure trace ({error!r})") from None
            first = first or at
            yield (at - first).total_seconds(), answer

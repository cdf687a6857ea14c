"""The pure parts of the FP8 quality benchmark: packing questions, and comparing what was read."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.quality_compare import Comparison, percent
from benchmarks.quality_suites import Passage, japanese, maths, pack


class _Letters:
    """A tokenizer of letters."""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(letter) for letter in text]}


def test_passages_hold_whole_questions_and_know_their_answers() -> None:
    questions = [("ask", "yes"), ("what", "no"), ("how", "so"), ("left", "over")]
    first, second = pack(_Letters(), "maths", questions, length=10)
    assert "".join(map(chr, first.tokens)) == "askyeswhatno"
    assert [number for number, own in enumerate(first.answer) if own] == [3, 4, 5, 10, 11]
    assert "".join(map(chr, second.tokens)) == "howsoleftover"


def test_maths_and_japanese_are_read_as_they_lie(tmp_path: Path) -> None:
    problem = {"question": "1 + 1?", "answer": "It is 2."}
    (tmp_path / "gsm8k_test.jsonl").write_text(json.dumps(problem) + "\n")
    assert list(maths(tmp_path)) == [("Question: 1 + 1?\nAnswer: ", "It is 2.\n\n")]
    (tmp_path / "jmmlu_a.csv").write_text("\ufeffq1,a,b,c,d,B\nq2,a,b,c,d,C\nshort,row\n")
    (tmp_path / "jmmlu_b.csv").write_text('"q3, long",a,b,c,d,D\n')
    found = list(japanese(tmp_path))
    assert [question.splitlines()[0] for question, _ in found] == [
        "質問: q1",
        "質問: q3, long",
        "質問: q2",
    ]
    assert [answer for _, answer in found] == ["B\n\n", "D\n\n", "C\n\n"]


def _read(losses: Sequence[Sequence[float]], best: int) -> dict[str, Any]:
    return {"passages": [{"loss": list(each), "best": [best] * len(each)} for each in losses]}


@pytest.fixture
def comparison() -> Comparison:
    texts = [
        Passage("code", [0, 0, 0], [False, False, True]),
        Passage("maths", [0, 0, 0, 0], [False, True, True, False]),
    ]
    raw = {
        "bf16": _read([[1.0, 1.0], [2.0, 2.0, 2.0]], 5),
        "plain": _read([[1.2, 1.0], [2.1, 2.1, 2.0]], 5),
        "ours": _read([[1.1, 1.0], [2.0, 2.1, 2.0]], 6),
    }
    return Comparison(texts, raw, "bf16")


def test_losses_are_those_of_the_tokens_asked_for(comparison: Comparison) -> None:
    assert comparison.names == ["plain", "ours"]
    assert comparison.loss("plain", None)["percent"] == pytest.approx(percent(0.4 / 5))
    assert comparison.loss("plain", "code")["percent"] == pytest.approx(percent(0.1))
    answers = comparison.loss("plain", None, answers=True)
    assert answers["percent"] == pytest.approx(percent(0.2 / 3))
    whole = comparison.loss("plain", None)
    assert whole["low"] < whole["percent"] < whole["high"]


def test_ratios_are_those_of_nats_lost(comparison: Comparison) -> None:
    assert comparison.ratio("ours", "plain")["ratio"] == pytest.approx(0.5)
    assert comparison.ratio("ours", "plain", "code") == pytest.approx(
        {"ratio": 0.5, "low": 0.5, "high": 0.5}
    )


def test_agreement_counts_the_same_next_token(comparison: Comparison) -> None:
    assert comparison.agreement("plain") == 1
    assert comparison.agreement("ours") == 0

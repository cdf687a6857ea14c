"""All short benchmarks in one run: what fails is told at the end and stops nothing."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.report import Report
from benchmarks.short import Script, run, scripts, summary
from benchmarks.tables import fill

_WRITES = """
import json, sys
bar = {"name": "speed", "value": 2.0, "bound": 1.0, "direction": "max", "holds": %s}
json.dump({"bars": [bar]}, open(%r, "w"))
sys.exit(%d)
"""


def _script(tmp_path: Path, code: str, limit: int = 60) -> Script:
    (tmp_path / "script.py").write_text(code)
    return Script("some", (str(tmp_path / "script.py"),), limit)


def _run(tmp_path: Path, holds: bool, status: int) -> list[str]:
    code = _WRITES % (holds, str(tmp_path / "bench_some.json"), status)
    return run(_script(tmp_path, code), tmp_path).problems


def test_a_bar_that_does_not_hold_is_named_with_its_value(tmp_path: Path) -> None:
    assert _run(tmp_path, holds=True, status=0) == []
    assert _run(tmp_path, holds=False, status=1) == ["speed: 2, expected <= 1"]


def test_a_script_that_fails_or_hangs_is_a_problem_and_one_without_a_result_is_said(
    tmp_path: Path,
) -> None:
    failed = run(_script(tmp_path, "raise SystemExit(3)"), tmp_path)
    assert failed.problems == ["failed with exit status 3"]
    hangs = "import signal; signal.pause()"
    assert run(_script(tmp_path, hangs, 1), tmp_path).problems == ["interrupted after 1 s"]
    skipped = run(_script(tmp_path, "print('no data')"), tmp_path)
    assert not skipped.problems and not skipped.ran
    assert summary([failed, skipped]).row_count == 2


def test_every_script_of_the_folder_is_in_it_and_short() -> None:
    found = {each.name: each for each in scripts(Namespace(trace=None, data=None))}
    assert {path.stem for path in Path("benchmarks").glob("bench_*.py")} < found.keys()
    assert {"rag_chat", "plan"} < found.keys()
    assert all("--quick" in each.words for each in found.values())


def test_a_short_result_names_the_full_one_that_it_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bench_x.json"
    Report("full").finish(path)
    full = json.loads(path.read_text())
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--quick"])
    for _ in range(2):
        report = Report("short")
        report.at_most("b", 1, 2)
        report.finish(path)
        short = json.loads(path.read_text())
        assert short["short"] and short["replaces full"]["commit"] == full["commit"]
    assert "in place of the full run" in fill("<!-- table bars -->\n<!-- end -->\n", tmp_path)
    monkeypatch.undo()
    Report("full").finish(path)
    assert "replaces full" not in json.loads(path.read_text())

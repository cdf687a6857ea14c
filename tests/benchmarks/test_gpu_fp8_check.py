"""The GPU check where there is no GPU: its cases hold in plain torch, and it says what it lacks."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_fp8_modules import lacking

_SCRIPTS = Path(__file__).parents[2] / "benchmarks"
_SLOW = "SGLANG_EXT_SLOW_TESTS"


# Runs a script as a machine without SGLang would.
_ALONE = (
    "import runpy, sys; sys.modules['sglang'] = None; sys.argv = sys.argv[1:]; "
    "sys.path.insert(0, sys.argv[0].rpartition('/')[0]); "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)


def _run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _ALONE, str(_SCRIPTS / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.trial(91)
def test_every_case_holds_in_plain_torch_and_nothing_is_kept(tmp_path: Path) -> None:
    done = _run("gpu_fp8_check.py", "--reference-only", "--json", str(tmp_path / "kept.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("yes") == 9
    assert not (tmp_path / "kept.json").exists()


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module, on the CPU."""
    monkeypatch.syspath_prepend(_SCRIPTS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    module = importlib.import_module("gpu_fp8_check")
    monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(module, "WORKSPACE_BYTES", 16)
    return module


def test_what_it_asks_of_flashinfer_is_what_the_answers_need(check: Any) -> None:
    """Against FlashInfer's own signatures, with its arithmetic done in float32."""
    pytest.importorskip("flashinfer")
    from tests.patches.flashinfer_fake import FakeFlashInfer

    tried = 0
    for case in check.CASES:
        pages = check.Pages(case, "cpu", 0)
        expected = pages.expected()
        for path in (check.by_flashinfer, check.merged):
            if path in dict(check.paths(case)).values():
                tried += 1
                assert check.error(path(pages, FakeFlashInfer), expected) < check.BOUND
    assert tried == len(check.CASES) - 1


def test_every_batch_that_is_timed_can_be_computed(
    check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flashinfer")
    from tests.patches.flashinfer_fake import FakeFlashInfer

    shapes = set()
    monkeypatch.setattr(check, "_time", lambda call: shapes.add(call().shape))
    for case in check.decodes(requests=2, length=32):
        check.time_decode(case, FakeFlashInfer)
    assert shapes == {(2, 32, 128), (2, 128, 512)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_and_keeps_nothing(tmp_path: Path) -> None:
    done = _run("gpu_fp8_check.py", "--json", str(tmp_path / "kept.json"))
    assert done.returncode == 2
    assert "no NVIDIA GPU here" in done.stderr
    assert not (tmp_path / "kept.json").exists()


def test_no_figure_is_kept_that_no_gpu_gave() -> None:
    path = _SCRIPTS / "results" / "gpu_fp8.json"
    if path.exists():
        assert json.loads(path.read_text(encoding="utf-8"))["figures"]["GPU"]


def _lacking() -> str:
    missing = lacking()
    if missing is None and os.environ.get(_SLOW) != "1":
        missing = f"compiles for minutes; set {_SLOW}=1"
    return missing or ""


@pytest.mark.slow
@pytest.mark.skipif(bool(_lacking()), reason=_lacking())
@pytest.mark.parametrize("module", ["latent e4m3", "heads e4m3"])
def test_flashinfer_compiles_for_hopper(module: str, tmp_path: Path) -> None:
    done = _run("gpu_fp8_modules.py", "--out", str(tmp_path), "--only", module)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{module}: " in done.stdout and ".so" in done.stdout

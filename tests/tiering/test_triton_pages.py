"""The Triton kernels where there is no GPU: under Triton's interpreter, and compiled for Hopper."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

_SHARED_BYTES = 227 * 1024
"""What one program may have on a Hopper GPU."""


def test_the_kernels_under_the_interpreter() -> None:
    tests = Path(__file__).with_name("triton_kernels.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(tests)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout


def _compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = types | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32))


@pytest.mark.parametrize(("pages", "shifted"), [("fp8e4nv", False), ("fp8e5", True)])
@pytest.mark.parametrize(("group", "width", "tail"), [(4, 128, 0), (128, 512, 64)])
def test_the_reader_compiles_for_hopper(
    pages: str, shifted: bool, group: int, width: int, tail: int
) -> None:
    from sglang_ext.tiering import triton_pages

    types = dict.fromkeys(("query", "output"), "*bf16")
    types |= dict.fromkeys(("keys", "values"), f"*{pages}")
    types |= dict.fromkeys(("key_shift", "value_shift"), "*fp32")
    types |= dict.fromkeys(("starts", "pages", "lengths"), "*i32") | {"scale": "fp32"}
    types |= dict.fromkeys(("key_stride", "key_head", "value_stride", "value_head"), "i32")
    constants = {"kv_heads": 1, "group": group, "rows": 16, "dim": width + tail, "width": width}
    constants |= {"tail": tail, "block": 64, "page_size": 16, "shifted": shifted, "exact": False}
    compiled = _compiled(triton_pages._attend, types, constants)
    assert compiled.metadata.shared <= _SHARED_BYTES
    assert "sm_90a" in compiled.asm["ptx"]


@pytest.mark.parametrize("feedback", [False, True])
def test_the_writer_compiles_for_hopper(feedback: bool) -> None:
    from sglang_ext.tiering import triton_pages

    types = {"rows": "*bf16", "codes": "*fp8e4nv", "inverse": "*fp32", "mean": "*fp32"}
    types |= {"order": "*i64", "spread": "*fp32", "tokens": "i32", "stride": "i32"}
    constants = {"heads": 8, "dim": 128, "lanes": 128, "block": 16, "mantissa": 3, "lowest": -6}
    constants |= {"largest": 448.0, "feedback": feedback}
    compiled = _compiled(triton_pages._write, types, constants)
    assert compiled.metadata.shared <= _SHARED_BYTES
    assert "e4m3x2" in compiled.asm["ptx"]

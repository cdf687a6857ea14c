"""Builds, keeps and calls the C++ decode kernel; without one, plain torch serves.

The kernel is one file without dependencies, compiled by the machine's own C++ compiler when it is
first wanted (about three seconds) and kept in the user's cache folder. Its name there is a hash of
all that went into it, so that another processor or release builds its own. It is used only after
its answer on a small batch was checked.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from sglang_ext.errors import SglangExtError
from sglang_ext.folders import cache_folder
from sglang_ext.patches.cpu_attention_meta import Reach, SlotList, Step
from sglang_ext.patches.cpu_attention_ops import Scoring, attend_decode, gather

__all__ = ["DecodeKernel", "build_kernel", "load_kernel"]

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_suffix(".cpp")
_FLAGS = [
    *("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-fopenmp"),
    # Sums may be taken in any order; infinities and NaN keep their meaning.
    *("-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros"),
]
_PAGE_TYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
_LANES = 16
_BUILD_TIMEOUT_S = 120


class _Shape(ctypes.Structure):
    """``Shape`` of the C++ file, field for field."""

    _fields_ = [
        ("requests", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("value_width", ctypes.c_int64),
        ("key_stride", ctypes.c_int64),
        ("value_stride", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
    ]


class DecodeKernel:
    """Decode attention that reads pages where they lie, from the library at ``path``.

    Raises OSError where the file is no such library.
    """

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def takes(self, keys: torch.Tensor, value_width: int) -> bool:
        """Whether this kernel reads pages of that type and width."""
        widths = keys.shape[-1] % _LANES == 0 and value_width % _LANES == 0
        return widths and keys.dtype in _PAGE_TYPES and keys.stride()[1:] == (keys.shape[-1], 1)

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: SlotList,
        scoring: Scoring,
    ) -> torch.Tensor:
        """Attend one new token a request: ``[n, heads, width]`` over ``[slots, kv_heads, width]``.

        ``values`` may be the first columns of ``keys``, with one KV head. Returns float32
        ``[n, heads, value_width]``.
        """
        n, heads, width = query.shape
        query = query.float().contiguous()
        output = query.new_empty(n, heads, values.shape[-1])
        shape = _Shape(
            requests=n,
            heads=heads,
            kv_heads=keys.shape[1],
            width=width,
            value_width=values.shape[-1],
            key_stride=keys.stride(0),
            value_stride=values.stride(0),
            threads=torch.get_num_threads(),
            scale=scoring.scale,
            soft_cap=scoring.soft_cap,
        )
        function = getattr(self._library, f"decode_{str(keys.dtype).removeprefix('torch.')}")
        tensors = (query, keys, values, slots.slots, slots.starts, output)
        function(ctypes.byref(shape), *(ctypes.c_void_p(each.data_ptr()) for each in tensors))
        return output


@cache
def load_kernel() -> DecodeKernel | None:
    """Return this machine's kernel, built if need be; None, with a line in the log, without one."""
    try:
        kernel = DecodeKernel(build_kernel(cache_folder()))
    except (OSError, SglangExtError, subprocess.SubprocessError) as error:
        logger.warning("Decode attention falls back to plain torch: %s", error)
        return None
    if not _answers_rightly(kernel):
        logger.warning("Decode attention falls back to plain torch: its kernel computes wrongly")
        return None
    return kernel


def build_kernel(folder: Path) -> Path:
    """Return the library for this machine in ``folder``, compiled unless it is there.

    Raises OSError or subprocess.SubprocessError where it cannot be built.
    """
    if "AVX512" not in torch.backends.cpu.get_cpu_capability():
        raise OSError("the kernel needs a processor with AVX-512")
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise OSError("the kernel needs a C++ compiler; install g++ or set CXX")
    library = folder / f"cpu_attention-{_fingerprint(compiler)}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # Compiled aside and renamed, so that whoever sees the library sees all of it.
        with tempfile.TemporaryDirectory(dir=folder, prefix=".cpu_attention-") as scratch:
            partial = Path(scratch, library.name)
            _run([compiler, *_FLAGS, str(_SOURCE), "-o", str(partial)])
            partial.replace(library)
    return library


def _fingerprint(compiler: str) -> str:
    """Hash the source, the flags and what ``-march=native`` means to this compiler here."""
    native = _run([compiler, "-march=native", "-Q", "--help=target"])
    parts = (_SOURCE.read_text(encoding="utf-8"), " ".join(_FLAGS), compiler, native)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _run(command: list[str]) -> str:
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=_BUILD_TIMEOUT_S
    )
    if result.returncode != 0:
        last = result.stderr.strip().splitlines()[-1:]
        raise OSError(f"{command[0]} failed with status {result.returncode}: {' '.join(last)}")
    return result.stdout


def _answers_rightly(kernel: DecodeKernel) -> bool:
    """Compare the kernel with plain torch on two requests of unlike length."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, 80, generator=generator)
    keys = torch.randn(256, 2, 80, generator=generator)
    table = torch.randperm(256, generator=generator).int().view(2, 128)
    reach, scoring = Reach(-1, False), Scoring(0.1, 3.0)
    step = Step(table, torch.arange(2), [128, 70], None, torch.float32)
    found = kernel.attend(query, keys, keys, step.ragged(reach), scoring)
    for group in step.decode(reach):
        pages = gather(keys, group.slots, torch.float32)
        expected = attend_decode(query[group.requests], pages, pages, group, scoring)
        if not torch.allclose(found[group.requests], expected, rtol=1e-4, atol=1e-4):
            return False
    return True

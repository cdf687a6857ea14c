"""Builds and keeps the C++ kernels: one library, compiled on the machine that runs it.

The sources have no dependencies. They are compiled by the machine's own C++ compiler when a kernel
is first wanted (about five seconds) and kept in the user's cache folder. The library's name there
is a hash of all that went into it, so that another processor or release builds its own.
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

__all__ = ["build_library", "load_library"]

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_SOURCES = [_FOLDER / f"cpu_{name}_kernel.cpp" for name in ("attention", "extend", "fp8", "ops")]
_HEADER = _FOLDER / "cpu_kernels_common.h"
_FLAGS = [
    *("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-fopenmp"),
    # Sums may be taken in any order; infinities and NaN keep their meaning.
    *("-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros"),
]
_BUILD_TIMEOUT_S = 120


@cache
def load_library() -> ctypes.CDLL | None:
    """Return this machine's kernels, built if need be; None, with a line in the log, without."""
    try:
        return ctypes.CDLL(str(build_library(cache_folder())))
    except (OSError, SglangExtError, subprocess.SubprocessError) as error:
        logger.warning("The CPU kernels are missing, and plain torch serves: %s", error)
        return None


def build_library(folder: Path) -> Path:
    """Return the library for this machine in ``folder``, compiled unless it is there.

    Raises OSError or subprocess.SubprocessError where it cannot be built.
    """
    if "AVX512" not in torch.backends.cpu.get_cpu_capability():
        raise OSError("they need a processor with AVX-512")
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise OSError("they need a C++ compiler; install g++ or set CXX")
    library = folder / f"cpu_kernels-{_fingerprint(compiler)}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # Compiled aside and renamed, so that whoever sees the library sees all of it.
        with tempfile.TemporaryDirectory(dir=folder, prefix=".cpu_kernels-") as scratch:
            partial = Path(scratch, library.name)
            _run([compiler, *_FLAGS, *map(str, _SOURCES), "-o", str(partial)])
            partial.replace(library)
    return library


def _fingerprint(compiler: str) -> str:
    """Hash the sources, the flags and what ``-march=native`` means to this compiler here."""
    native = _run([compiler, "-march=native", "-Q", "--help=target"])
    sources = [source.read_text(encoding="utf-8") for source in (*_SOURCES, _HEADER)]
    parts = (*sources, " ".join(_FLAGS), compiler, native)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _run(command: list[str]) -> str:
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=_BUILD_TIMEOUT_S
    )
    if result.returncode != 0:
        last = result.stderr.strip().splitlines()[-1:]
        raise OSError(f"{command[0]} failed with status {result.returncode}: {' '.join(last)}")
    return result.stdout

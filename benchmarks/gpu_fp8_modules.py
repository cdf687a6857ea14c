"""Compile what ``gpu_fp8_check.py`` needs of FlashInfer for a Hopper GPU (SM90), on any machine.

Needs FlashInfer 0.7.2, nvcc 13, a C++ compiler and ninja, and no GPU; minutes a module. Then run
the check with ``FLASHINFER_WORKSPACE_BASE`` set to the folder, so that it compiles nothing.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["MODULES", "build", "lacking"]

MODULES = ("heads e4m3", "heads e5m2", "heads bf16", "latent e4m3", "latent bf16")


def lacking() -> str | None:
    """Return what this machine has not, None where modules can be compiled."""
    if importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer cannot be imported"
    absent = [program for program in ("c++", "ninja") if shutil.which(program) is None]
    absent += [] if cuda_home() else ["CUDA toolkit (nvcc and libcudart; CUDA_HOME)"]
    return f"there is no {', no '.join(absent)} here" if absent else None


def cuda_home() -> Path | None:
    """Return the folder of the CUDA toolkit; ``nvcc`` on the path may be a script elsewhere."""
    nvcc = shutil.which("nvcc")
    folders = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))]
    folders += [Path(nvcc).resolve().parents[1]] if nvcc else []
    parts = ("bin/nvcc", "lib64/libcudart.so")
    return next((one for one in folders if all((one / part).exists() for part in parts)), None)


def build(module: str, folder: Path) -> Path:
    """Compile one of ``MODULES`` into ``folder`` and return the library.

    Sets FlashInfer's environment, so that it has to come before FlashInfer is first imported.
    """
    prepare(folder)
    spec = _spec(*module.split())
    spec.build(verbose=False)
    library: Path = spec.jit_library_path
    return library


def prepare(folder: Path) -> None:
    """Tell FlashInfer where to work and for which GPU, and stand in for the driver's library."""
    toolkit = cuda_home()
    assert toolkit is not None, "ask lacking() first"
    stubs = folder / "stubs"
    stubs.mkdir(parents=True, exist_ok=True)
    command = ["c++", "-shared", "-xc", "/dev/null", "-Wl,-soname,libcuda.so.1", "-o"]
    subprocess.run([*command, str(stubs / "libcuda.so")], check=True)
    os.environ |= {
        "FLASHINFER_WORKSPACE_BASE": str(folder),
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "FLASHINFER_EXTRA_LDFLAGS": f"-L{stubs}",
        "CUDA_HOME": str(toolkit),
    }


def _spec(kind: str, pages: str) -> Any:
    import torch
    from flashinfer.jit.attention import modules

    bf16 = torch.bfloat16
    stored = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "bf16": bf16}[pages]
    types = (bf16, stored, bf16, torch.int32)
    if kind == "latent":
        return modules.gen_batch_mla_module("fa3", *types, 512, 64, False)
    # What FlashInfer itself builds for its FA2 wrappers, where K and V lie alike in memory.
    return modules._gen_batch_prefill_primary_module("fa2", *types, 128, 128, 0, *[False] * 3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--only", choices=MODULES, action="append", help="default: all")
    options = parser.parse_args()
    if (reason := lacking()) is not None:
        print(f"gpu_fp8_modules: {reason}", file=sys.stderr)
        return 2
    for module in options.only or MODULES:
        library = build(module, options.out.resolve())
        print(f"{module}: {library.name}, {library.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())

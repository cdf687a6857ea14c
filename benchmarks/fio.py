"""Runs fio, the yardstick of what a disk can do, on one file of a folder."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Literal, NamedTuple

__all__ = ["MISSING", "Fio", "installed", "passes_page_cache"]

MISSING = "not installed: apt-get install fio. Moves are measured, no bar is checked"

Way = Literal["write", "read"]


class Fio(NamedTuple):
    """What one run of fio measured."""

    bytes_per_s: float
    p50_s: float
    p99_s: float

    @classmethod
    def run(cls, folder: Path, way: Way, block: int, total: int, depth: int) -> "Fio":
        """Write a fresh file of ``total`` bytes in ``folder``, or read what was written last."""
        path = folder / "fio"
        if way == "write":
            path.unlink(missing_ok=True)
        options = {
            "name": "bench",
            "filename": path,
            "rw": way,
            "bs": block,
            "size": total,
            "iodepth": depth,
            "numjobs": 1,
            "ioengine": "libaio",
            "direct": int(passes_page_cache(folder)),
            "fallocate": "native",
            "end_fsync": 0,
            "output-format": "json",
        }
        command = ["fio", *(f"--{name}={value}" for name, value in options.items())]
        shown = subprocess.run(command, check=True, capture_output=True, text=True)
        result: dict[str, Any] = json.loads(shown.stdout)["jobs"][0][way]
        percentile = result["clat_ns"]["percentile"]
        p50, p99 = (percentile[key] / 1e9 for key in ("50.000000", "99.000000"))
        return cls(result["bw_bytes"], p50, p99)


def installed() -> bool:
    """Tell whether fio is on this machine."""
    return shutil.which("fio") is not None


def passes_page_cache(folder: Path) -> bool:
    """Tell whether the file system of ``folder`` has O_DIRECT, which the store uses if it can."""
    path = folder / "direct"
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o600))
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
    return True

"""Looks for bytes in the memory of a running process."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import psutil

__all__ = ["found_in", "scheduler_of"]

_CHUNK = 2**20
_LONGEST = 2**12
_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw")


def scheduler_of(launcher: int) -> int:
    """Return the process with the pools of a server that has one scheduler."""
    children = psutil.Process(launcher).children(recursive=True)
    (found,) = [child.pid for child in children if "scheduler" in " ".join(child.cmdline())]
    return found


def found_in(pid: int, patterns: Sequence[bytes]) -> dict[bytes, set[tuple[int, int]]]:
    """Return in which writable regions of memory each pattern lies. O(memory * patterns)."""
    found: dict[bytes, set[tuple[int, int]]] = {pattern: set() for pattern in patterns}
    for region, chunk in _chunks(pid):
        # Most of it is zeros, and bytes.find crawls over those.
        if not np.frombuffer(chunk[: len(chunk) // 8 * 8], np.uint64).any():
            continue
        for pattern in patterns:
            if pattern in chunk:
                found[pattern].add(region)
    return found


def _regions(pid: int) -> Iterator[tuple[int, int]]:
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        match = _LINE.match(line)
        if match:
            yield int(match[1], 16), int(match[2], 16)


def _chunks(pid: int) -> Iterator[tuple[tuple[int, int], bytes]]:
    """Read region by region; a chunk overlaps the next one of its region."""
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for start, end in _regions(pid):
            for place in range(start, end, _CHUNK):
                chunk = _read(memory, place, min(_CHUNK + _LONGEST, end - place))
                yield (start, end), chunk


def _read(memory: BinaryIO, place: int, size: int) -> bytes:
    """Read what is there; a region may be gone by now."""
    try:
        memory.seek(place)
        return memory.read(size)
    except (OSError, ValueError):
        return b""

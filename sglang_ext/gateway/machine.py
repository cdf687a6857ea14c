"""What this machine has for engines: GPUs and ports."""

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from sglang_ext.errors import UnsupportedError

__all__ = ["free_ports", "gpu_variables", "visible_gpus"]

_VARIABLE = "CUDA_VISIBLE_DEVICES"
_DRIVER = Path("/proc/driver/nvidia/gpus")


def visible_gpus(
    environment: Mapping[str, str] = os.environ, driver: Path = _DRIVER
) -> tuple[int, ...]:
    """Return the numbers of the GPUs that this server may use, none on a machine without.

    Asks the driver's own files, since a library for CUDA would hold memory on every GPU.
    """
    count = len(list(driver.iterdir())) if driver.is_dir() else 0
    given = environment.get(_VARIABLE)
    if given is None or not count:
        return tuple(range(count))
    words = [word.strip() for word in given.split(",") if word.strip()]
    if not all(word.isdecimal() for word in words):
        raise UnsupportedError(
            f"{_VARIABLE} holds {given!r}; with several engines it has to name numbers"
        )
    return tuple(map(int, words))


def gpu_variables(gpus: tuple[int, ...]) -> dict[str, str]:
    """Return what an engine with these GPUs finds in its environment; nothing without any."""
    return {_VARIABLE: ",".join(map(str, gpus))} if gpus else {}


def free_ports(count: int) -> list[int]:
    """Return ports of 127.0.0.1 that nobody listens on now."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()

"""What an adapter is, and what it is given."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engines import Engine
from benchmarks.peers.environments import Environment

__all__ = ["BYTES_PER_TOKEN", "PORT", "Budget", "Peer", "Running"]

BYTES_PER_TOKEN = 23_040
"""KV of one token of the demo model in bf16: 30 layers, K and V, 3 heads of 64 numbers."""

PORT = 31_500
"""Of the engine; its helpers take the ports after it."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What every peer gets: tokens in HBM and in host memory, bytes on the disk."""

    hbm: int
    cpu: int
    disk: int
    tenants: tuple[str, ...]

    @property
    def cpu_bytes(self) -> int:
        """The host tier in bf16."""
        return self.cpu * BYTES_PER_TOKEN


@dataclass(frozen=True)
class Running:
    """A peer that answers, and all its processes: their CPU seconds are its cost."""

    engine: Engine
    pids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Peer:
    """``start`` runs the peer with a budget and an empty folder until its block ends."""

    name: str
    what: str
    environment: Environment
    start: Callable[[Budget, Path], AbstractContextManager[Running]]

"""How big a run is: the scale, the budgets, and how the load comes."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.peers import Budget
from sglang_ext.plan.workload import RagShape, RagTraffic, Turn, rag_turns

__all__ = ["QUICK", "REFERENCE", "Setting"]

_DISK_BYTES = 8 * 10**9
_BLOCK = 32
"""Budgets are whole blocks of the engine with the largest ones."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Lengths and budgets in tokens of the reference workload; ``scale`` multiplies them all.

    ``rate`` in turns a second makes the loop open, else ``clients`` close it.
    """

    scale: float = 0.125
    conversations: int = 56
    clients: int = 3
    rate: float | None = None
    hbm: int = 65_536
    cpu: int = 98_304

    def with_given(self, given: Mapping[str, Any]) -> "Setting":
        """Return a setting in which what is not None takes the place of ours."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})

    @property
    def key(self) -> str:
        """Names the setting: two with the same key measure the same."""
        return json.dumps(asdict(self), sort_keys=True)

    def turns(self, seed: int) -> list[Turn]:
        """Return the workload of a seed."""
        shape, traffic = RagShape().scaled(self.scale), RagTraffic(conversations=self.conversations)
        return rag_turns(shape, traffic, seed)

    def budget(self, tenants: tuple[str, ...]) -> Budget:
        """Return what every peer gets."""
        hbm, cpu = (_blocks(tokens * self.scale) for tokens in (self.hbm, self.cpu))
        return Budget(hbm=hbm, cpu=cpu, disk=_DISK_BYTES, tenants=tenants)


def _blocks(tokens: float) -> int:
    return round(tokens / _BLOCK) * _BLOCK


REFERENCE = Setting()
QUICK = Setting(scale=0.0625, conversations=32, clients=2, hbm=40_960, cpu=61_440)
"""Shorter texts, smaller pools and fewer conversations: it shows that everything runs."""

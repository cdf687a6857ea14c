"""This project: one tier, three tiers, and three tiers with FP8 pages in half the bytes."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks.engines import engine, write_policy
from benchmarks.peers.base import PORT, Budget, Peer, Running
from benchmarks.peers.environments import OURS
from benchmarks.peers.sglang import flags

__all__ = ["FP8", "ONE_TIER", "THREE_TIERS"]

_TIMES = "defaults: {ttl: {hbm: 1s, cpu: 5s}}\n"
"""How long shares protect a page that nobody uses. The small pools turn over in 5 to 10 seconds,
those of the reference machine in minutes; times are scaled with them."""


@contextmanager
def _run(tiers: bool, dtype: str, budget: Budget, folder: Path) -> Iterator[Running]:
    policy = write_policy(folder, budget.tenants)
    # FP8: as many tokens, half the bytes.
    size = budget.cpu_bytes // (1 if dtype == "auto" else 2)
    with policy.open("a", encoding="utf-8") as file:
        file.write(_TIMES + (_tiers(size, budget.disk, folder / "pages") if tiers else ""))
    own = ["--tenant-policy", str(policy), "--kv-cache-dtype", dtype]
    with engine("ours", "sglang_ext.launch_server", PORT, [*own, *flags(budget.hbm)]) as server:
        yield Running(server, (server.pid,))


def _tiers(cpu: int, disk: int, folder: Path) -> str:
    return f"tiers: {{cpu: {{size: {cpu}B}}, nvme: {{size: {disk}B, path: {folder}}}}}\n"


ONE_TIER = Peer(
    name="ours, one tier",
    what="sglang_ext, HBM only",
    environment=OURS,
    start=partial(_run, False, "auto"),
)
THREE_TIERS = Peer(
    name="ours, three tiers",
    what="sglang_ext, HBM, host memory and disk",
    environment=OURS,
    start=partial(_run, True, "auto"),
)
FP8 = Peer(
    name="ours, three tiers, FP8",
    what="the same with fp8_e4m3 pages: as many tokens in half the bytes of HBM and host memory",
    environment=OURS,
    start=partial(_run, True, "fp8_e4m3"),
)

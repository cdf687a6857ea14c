"""How fast pages move between the tiers, and the NVMe store beside fio.

    python benchmarks/bench_tiers.py [--quick] [--folder DIR] [--json FILE]

Every move runs as SGLang calls it, on SGLang's own pools: HBM to CPU and back (without a GPU both
are host memory), CPU to NVMe and back through the storage backend. Rates are of batches of 128
pages, latencies of one page at a time; both count the bytes of pages, without headers.

fio runs on the same folder in the same round, in turns, as equal as it can be made: the same block
size and depth (threads of the store, ``iodepth`` of one job), past the page cache wherever the
folder allows it, no fsync on either side, a fresh file with its blocks reserved, which is then read
back. It moves bare blocks; the store also copies from and to the host pool, hashes, keeps its
index, and may join neighbouring pages in one request. ``disk, 1 MiB`` is what fio gets with
requests of that size, whatever the page.
"""

import gc
import shutil
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import fio
import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from report import Report, arguments
from sglang_ext.patches.hicache_cpu import enable_hicache
from sglang_ext.tiering.file_io import FileIO
from sglang_ext.tiering.storage_backend import ExtStorage
from sglang_ext.tiering.workers import measure_depth
from sglang_ext.types import Owner

KIB, MIB = 2**10, 2**20
SIZES = [64 * KIB, 256 * KIB, MIB, 4 * MIB]
PAGE_TOKENS = 16
LAYERS = 8
HEAD_DIM = 128
BATCH = 128
"""Pages in a batch, as SGLang sends them."""
SINGLES = 100
"""Pages moved one at a time, for latencies."""
FLOOR = 0.8
OWNER = Owner("t:bench")
MOVES = ("hbm to cpu", "cpu to hbm", "cpu to nvme", "nvme to cpu")
BESIDE = {"cpu to nvme": "write", "nvme to cpu": "read"}
"""What fio does beside a move."""

Run = dict[str, Any]


class Pools:
    """SGLang's device pool and host pool, a batch of pages of ``size`` bytes each."""

    def __init__(self, size: int) -> None:
        heads = size // (2 * LAYERS * HEAD_DIM * 2 * PAGE_TOKENS)
        self.tokens = BATCH * PAGE_TOKENS
        self.on_gpu = torch.cuda.is_available()
        where = "cuda" if self.on_gpu else "cpu"
        self.hbm: Any = MHATokenToKVPool(
            self.tokens, PAGE_TOKENS, torch.bfloat16, heads, HEAD_DIM, LAYERS, where, False
        )
        self.cpu: Any = MHATokenToKVPoolHost(
            self.hbm.get_device_pool_infos()[0].buffer_info,
            1.0,
            0,
            PAGE_TOKENS,
            "layer_first",
            device_capacity_tokens=self.tokens,
            start_layer=0,
            end_layer=LAYERS - 1,
        )
        self.cpu.kv_buffer.view(torch.uint8).random_(0, 256)
        self._io = "kernel" if self.on_gpu else "direct"

    def slots(self, pages: range) -> torch.Tensor:
        """Return the tokens of these pages, counted round the pool."""
        starts = [page % BATCH * PAGE_TOKENS for page in pages]
        return torch.cat([torch.arange(start, start + PAGE_TOKENS) for start in starts])

    def to_cpu(self, pages: range) -> None:
        """Copy pages from HBM to host memory, all layers."""
        slots = self.slots(pages)
        self.cpu.backup_from_device_all_layer(self.hbm, slots, slots, self._io)
        self._finish()

    def to_hbm(self, pages: range) -> None:
        """Copy pages from host memory to HBM, layer by layer."""
        slots = self.slots(pages)
        for layer in range(LAYERS):
            self.cpu.load_to_device_per_layer(self.hbm, slots, slots, layer, self._io)
        self._finish()

    def _finish(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


def main() -> int:
    parser: ArgumentParser = arguments("bench_tiers", __doc__ or "")
    parser.add_argument("--folder", type=Path, help="a folder on the disk to measure")
    options = parser.parse_args()
    enable_hicache()
    # Passes over all objects of SGLang and torch are none of the store's cost.
    gc.freeze()
    report = Report("Moves between tiers, and the NVMe store beside fio")
    rounds, total = (2, 128 * MIB) if options.quick else (7, 512 * MIB)
    depth = depth_of(options.folder)
    report.figures |= {"depth": depth, "fio": "found" if fio.installed() else fio.MISSING}
    for size in SIZES:
        pools = Pools(size)
        runs = [
            one_round(options.folder, pools, size, total, depth, number) for number in range(rounds)
        ]
        report.runs += runs
        summarise(report, f"{size // KIB} KiB", runs)
    status = report.finish(options.json)
    return status if fio.installed() else 1


def depth_of(folder: Path | None) -> int:
    """Return the depth that a store chooses by itself in ``folder``."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        return measure_depth(Path(place), FileIO())


def one_round(
    folder: Path | None, pools: Pools, size: int, total: int, depth: int, number: int
) -> Run:
    """Move ``total`` bytes each way, with the store and with fio, in a fresh folder."""
    place = Path(tempfile.mkdtemp(prefix="bench_tiers", dir=folder))
    try:
        run: Run = {"size": size, "round": number, **measure_copies(pools, size, total // 4)}
        turns: list[Callable[[], Run]] = [lambda: measure_store(place, pools, size, total, depth)]
        if fio.installed():
            turns.append(lambda: measure_fio(place, size, total, depth))
        # Who goes first alternates, so that a disk that tires favours neither.
        for measure in turns if number % 2 == 0 else turns[::-1]:
            run |= measure()
        return run
    finally:
        shutil.rmtree(place)


def measure_copies(pools: Pools, size: int, total: int) -> Run:
    found = timed("hbm to cpu", pools.to_cpu, size, total)
    return found | timed("cpu to hbm", pools.to_hbm, size, total)


def measure_store(place: Path, pools: Pools, size: int, total: int, depth: int) -> Run:
    storage = open_storage(place / "store", pools, 8 * total, depth)
    keys = [f"{number:064x}" for number in range(total // size + SINGLES)]
    storage.note_owner(keys, OWNER)

    def put(pages: range) -> None:
        assert all(storage.batch_set_v1(keys[pages.start : pages.stop], pools.slots(pages)))

    def get(pages: range) -> None:
        assert all(storage.batch_get_v1(keys[pages.start : pages.stop], pools.slots(pages)))

    found = timed("cpu to nvme", put, size, total) | timed("nvme to cpu", get, size, total)
    storage.close()
    return found


def open_storage(folder: Path, pools: Pools, total_bytes: int, depth: int) -> ExtStorage:
    """Open our backend on a folder, as SGLang does."""
    config = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name="bench",
        extra_config={
            "folder": str(folder),
            "total_bytes": total_bytes,
            "weights_hash": "none",
            "depth": depth,
            "timeout_s": 60.0,
        },
    )
    storage = ExtStorage(config, {})
    storage.register_mem_pool_host(pools.cpu)
    return storage


def timed(move: str, act: Callable[[range], None], size: int, total: int) -> Run:
    """Return bytes per second of batches, and the seconds of single pages that come after them."""
    count = total // size
    begin = time.perf_counter()
    for start in range(0, count, BATCH):
        act(range(start, min(start + BATCH, count)))
    rate = count * size / (time.perf_counter() - begin)
    seconds = []
    for page in range(count, count + SINGLES):
        begin = time.perf_counter()
        act(range(page, page + 1))
        seconds.append(time.perf_counter() - begin)
    p50, p99 = (float(each) for each in np.percentile(seconds, [50, 99]))
    return {move: {"GB/s": rate / 1e9, "p50 ms": p50 * 1e3, "p99 ms": p99 * 1e3}}


def measure_fio(place: Path, size: int, total: int, depth: int) -> Run:
    found: Run = {}
    for way in ("write", "read"):
        batch = fio.Fio.run(place, way, size, total, depth)
        single = fio.Fio.run(place, way, size, SINGLES * size, 1)
        large = batch if size == MIB else fio.Fio.run(place, way, MIB, total, depth)
        found[f"fio {way}"] = {
            "GB/s": batch.bytes_per_s / 1e9,
            "p50 ms": single.p50_s * 1e3,
            "p99 ms": single.p99_s * 1e3,
        }
        found[f"disk, 1 MiB {way}"] = {"GB/s": large.bytes_per_s / 1e9}
    return found


def summarise(report: Report, label: str, runs: list[Run]) -> None:
    for name in (*MOVES, *(name for name in runs[0] if name.startswith(("fio", "disk")))):
        report.figures[f"{name}, {label}"] = {
            unit: float(median(run[name][unit] for run in runs)) for unit in runs[0][name]
        }
    for move, way in BESIDE.items():
        if fio.installed():
            ratio = median(run[move]["GB/s"] / run[f"fio {way}"]["GB/s"] for run in runs)
            report.at_least(f"{move}, {label}: store over fio {way}", ratio, FLOOR)


if __name__ == "__main__":
    sys.exit(main())

"""How fast the NVMe store moves pages, beside fio on the same folder with the same size and depth.

    python benchmarks/bench_tiers.py [--quick] [--folder DIR] [--json FILE]

Both write a fresh file and read it back past the page cache, one after the other in every round.
fio moves bare blocks; the store also copies from and to the caller, checks, and keeps its index.
Rates count bodies only. Latencies are of one page at a time.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from report import Report, arguments
from sglang_ext.tiering.caps import Caps
from sglang_ext.tiering.file_io import FileIO
from sglang_ext.tiering.nvme_store import NvmeStore, StoreConfig
from sglang_ext.tiering.page_format import Fingerprint
from sglang_ext.tiering.transfers import PageRef, copy_from, copy_into
from sglang_ext.tiering.workers import measure_depth
from sglang_ext.types import Owner

KIB = 1024
SIZES = [64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB]
BATCH = 128
"""Pages in a batch, as SGLang sends them."""
SINGLES = 100
"""Pages read or written one at a time, for latencies."""
FLOOR = 0.8
FINGERPRINT = Fingerprint(
    model_id="bench", weights_hash="none", kv_dtype="bf16", layout="flat", page_size=16
)
OWNER = Owner("t:bench")


def main() -> int:
    parser = arguments("bench_tiers", __doc__ or "")
    parser.add_argument("--folder", type=Path, help="a folder on the disk to measure")
    options = parser.parse_args()
    if shutil.which("fio") is None:
        parser.error("needs fio (apt-get install fio)")
    report = Report("NVMe store beside fio")
    sizes = SIZES[::2] if options.quick else SIZES
    rounds, total = (3, 128 * KIB * KIB) if options.quick else (7, 512 * KIB * KIB)
    depth = depth_of(options.folder)
    report.figures["depth"] = depth
    for size in sizes:
        runs = [one_round(options.folder, size, total, depth, number) for number in range(rounds)]
        report.runs += runs
        summarise(report, f"{size // KIB} KiB", runs)
    return report.finish(options.json)


def one_round(
    folder: Path | None, size: int, total: int, depth: int, number: int
) -> dict[str, Any]:
    """Write and read ``total`` bytes with both, in a fresh folder."""
    place = Path(tempfile.mkdtemp(prefix="bench_tiers", dir=folder))
    try:
        run: dict[str, Any] = {"size": size, "round": number}
        # Who goes first alternates, so that a disk that tires favours neither.
        turns = [measure_store, measure_fio]
        for measure in turns if number % 2 == 0 else turns[::-1]:
            run |= measure(place, size, total, depth)
        return run
    finally:
        shutil.rmtree(place)


def depth_of(folder: Path | None) -> int:
    """The depth that a store chooses by itself in ``folder``."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        return measure_depth(Path(place), FileIO())


def measure_store(place: Path, size: int, total: int, depth: int) -> dict[str, Any]:
    config = StoreConfig(
        folder=place / "store",
        fingerprint=FINGERPRINT,
        caps=Caps(total_bytes=8 * total),
        depth=depth,
        timeout_s=60.0,
    )
    store = NvmeStore(config)
    count = total // size
    refs = [PageRef(OWNER, b"%032d" % number) for number in range(count + SINGLES)]
    noise = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    bodies = [memoryview(noise)] * BATCH
    buffers = [memoryview(np.full(size, 1, np.uint8)) for _ in range(min(BATCH, count))]

    def put(some: list[PageRef]) -> bool:
        return all(store.put_batch(some, [size] * len(some), copy_from(bodies)))

    def get(some: list[PageRef]) -> bool:
        return all(store.get_batch(some, copy_into(buffers)))

    found: dict[str, Any] = {}
    for name, act in (("write", put), ("read", get)):
        found |= {f"store_{name}": rate(act, refs[:count], size)}
        found |= latencies(f"store_{name}", act, refs[count:])
    store.close()
    return found


def rate(act: Callable[[list[PageRef]], bool], refs: list[PageRef], size: int) -> float:
    """Bytes per second of batches one after the other."""
    begin = time.perf_counter()
    for start in range(0, len(refs), BATCH):
        assert act(refs[start : start + BATCH])
    return len(refs) * size / (time.perf_counter() - begin)


def latencies(
    name: str, act: Callable[[list[PageRef]], bool], refs: list[PageRef]
) -> dict[str, float]:
    seconds = []
    for ref in refs:
        begin = time.perf_counter()
        assert act([ref])
        seconds.append(time.perf_counter() - begin)
    p50, p99 = np.percentile(seconds, [50, 99])
    return {f"{name}_p50_s": float(p50), f"{name}_p99_s": float(p99)}


def measure_fio(place: Path, size: int, total: int, depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("write", "read"):
        found[f"fio_{name}"] = fio(place, name, size, total, depth)["bw_bytes"]
        single = fio(place, name, size, SINGLES * size, 1)["clat_ns"]["percentile"]
        found[f"fio_{name}_p50_s"] = single["50.000000"] / 1e9
        found[f"fio_{name}_p99_s"] = single["99.000000"] / 1e9
    return found


def fio(place: Path, name: str, size: int, total: int, depth: int) -> dict[str, Any]:
    """Run fio past the page cache; a write begins with a new file, a read reads it."""
    path = place / f"fio-{depth}"
    if name == "write":
        path.unlink(missing_ok=True)
    command = ["fio", "--name=bench", f"--filename={path}", f"--rw={name}", f"--bs={size}"]
    command += [f"--size={total}", f"--iodepth={depth}", "--ioengine=libaio", "--direct=1"]
    shown = subprocess.run(
        [*command, "--output-format=json"], check=True, capture_output=True, text=True
    )
    result: dict[str, Any] = json.loads(shown.stdout)["jobs"][0][name]
    return result


def summarise(report: Report, label: str, runs: list[dict[str, Any]]) -> None:
    for name in ("write", "read"):
        figures = {
            f"{who} {unit}": median(run[f"{who}_{name}{suffix}"] for run in runs) * scale
            for unit, suffix, scale in (
                ("GB/s", "", 1e-9),
                ("p50 ms", "_p50_s", 1e3),
                ("p99 ms", "_p99_s", 1e3),
            )
            for who in ("store", "fio")
        }
        report.figures[f"{name} {label}"] = figures
        ratio = median(run[f"store_{name}"] / run[f"fio_{name}"] for run in runs)
        report.at_least(f"{name} {label}: store over fio", ratio, FLOOR)


if __name__ == "__main__":
    sys.exit(main())

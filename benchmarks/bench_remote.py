"""What our layer costs on a shared Mooncake store: put and get of pages, beside the bare client.

    python benchmarks/bench_remote.py [--quick] [--json FILE]

A master and one process that lends memory run on loopback, over TCP. Ours is ``RemoteStore`` as the
server uses it: copies from and to the host's memory, names by owner, a question whether the page is
there, header, checksum, books, deadline, and for the encrypted owner AES-256-GCM. The bare client
moves as many bytes from and to memory that is registered already, 128 objects in one call, as
SGLang's own Mooncake backend does. They take turns, batch by batch, over fresh names.
"""

import ctypes
import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from mooncake_store import mooncake_store
from report import Report, arguments
from sglang_ext.tiering.caps import Caps
from sglang_ext.tiering.file_io import aligned_buffer
from sglang_ext.tiering.page_format import HEADER_BYTES, Fingerprint
from sglang_ext.tiering.remote_config import RemoteConfig
from sglang_ext.tiering.remote_mooncake import MooncakeAddress, MooncakeObjects, check_installed
from sglang_ext.tiering.remote_store import RemoteStore
from sglang_ext.tiering.transfers import PageRef, copy_from, copy_into
from sglang_ext.types import Owner

KIB, MIB = 2**10, 2**20
SIZES = [64 * KIB, 256 * KIB, MIB, 4 * MIB]
BATCH = 128
"""Pages in a batch, as SGLang sends them."""
FLOOR = 0.85
OWNERS = {"clear": Owner("t:bench"), "encrypted": Owner("s:bench")}
MASTER_KEY = bytes(range(32))
Run = dict[str, Any]


def main() -> int:
    options = arguments("bench_remote", __doc__ or "").parse_args()
    check_installed()
    gc.freeze()
    report = Report("A shared store on Mooncake, ours beside the bare client")
    rounds, total = (3, 128 * MIB) if options.quick else (9, 512 * MIB)
    with mooncake_store(int(total * 1.6)) as address:
        for size in SIZES:
            sides = Sides(address, size)
            sides.round(min(BATCH, total // size), min(total, 2 * BATCH * size), 0)  # connects
            runs = [sides.round(min(BATCH, total // size), total, each) for each in range(rounds)]
            sides.close()
            report.runs += runs
            summarise(report, f"{size // KIB} KiB", runs)
    return report.finish(options.json)


class Sides:
    """Ours in clear and encrypted, and the bare client, with pages of one size."""

    def __init__(self, address: MooncakeAddress, size: int) -> None:
        self.size = size
        self.objects = MooncakeObjects(address)
        fingerprint = Fingerprint(
            model_id="bench", weights_hash="", kv_dtype="bf16", layout=str(size), page_size=16
        )
        config = RemoteConfig(
            fingerprint=fingerprint,
            page_bytes=size,
            caps=Caps(total_bytes=2**60),
            timeout_s=60.0,
            encrypted=lambda owner: owner == OWNERS["encrypted"],
        )
        self.store = RemoteStore(config, self.objects, MASTER_KEY, background=False)
        self.store.start()
        assert self.store.answers, "the store does not answer"
        self.pages = [aligned_buffer(size) for _ in range(BATCH)]
        for page in self.pages:
            page[:] = os.urandom(size)
        self.fill, self.deliver = copy_from(self.pages), copy_into(self.pages)
        self.bare = aligned_buffer(BATCH * (size + HEADER_BYTES))
        self.client = self.objects._connected()
        address_of = ctypes.addressof(ctypes.c_char.from_buffer(self.bare))
        assert self.client.register_buffer(address_of, len(self.bare)) == 0
        self.places = [address_of + (size + HEADER_BYTES) * page for page in range(BATCH)]

    def round(self, batch: int, total: int, number: int) -> Run:
        """Move ``total`` bytes each way with each side; who goes first alternates."""
        sides: list[Callable[[range], Run]] = [
            lambda pages: self._ours("clear", pages),
            lambda pages: self._bare(pages),
            lambda pages: self._ours("encrypted", pages),
        ]
        moved: dict[str, list[float]] = {}
        for turn, start in enumerate(range(0, total // self.size, batch)):
            first = (number + turn) % len(sides)
            for side in sides[first:] + sides[:first]:
                pages = range(start, start + batch)
                for name, seconds in side(pages).items():
                    moved.setdefault(name, []).append(batch * self.size / seconds)
        return {"size": self.size, **{name: median(rates) for name, rates in moved.items()}}

    def close(self) -> None:
        self.store.close()

    def _ours(self, form: str, pages: range) -> Run:
        refs = [PageRef(OWNERS[form], b"%016d" % page) for page in pages]
        sizes = [self.size] * len(refs)
        put = timed(lambda: self.store.put_batch(refs, sizes, self.fill))
        get = timed(lambda: self.store.get_batch(refs, self.deliver))
        self.store.delete(refs)
        return {f"put, {form}": put, f"get, {form}": get}

    def _bare(self, pages: range) -> Run:
        names = [f"bare/{page}" for page in pages]
        places, sizes = self.places[: len(pages)], [self.size + HEADER_BYTES] * len(pages)
        put = timed(lambda: good(self.client.batch_put_from(names, places, sizes), 0))
        get = timed(lambda: good(self.client.batch_get_into(names, places, sizes), sizes[0]))
        self.client.batch_remove(names, True)
        return {"put, bare": put, "get, bare": get}


def good(codes: Sequence[int], expected: int) -> list[bool]:
    return [code == expected for code in codes]


def timed(move: Callable[[], list[bool]]) -> float:
    """Return the seconds of a batch in which every page succeeded."""
    begin = time.perf_counter()
    results = move()
    seconds = time.perf_counter() - begin
    assert all(results), "a page was lost"
    return seconds


def summarise(report: Report, label: str, runs: list[Run]) -> None:
    for way in ("put", "get"):
        for side in ("bare", "clear", "encrypted"):
            rate = median(run[f"{way}, {side}"] for run in runs)
            report.figures[f"{way}, {side}, {label}, GB/s"] = rate / 1e9
        for form in OWNERS:
            ratio = median(run[f"{way}, {form}"] / run[f"{way}, bare"] for run in runs)
            if form == "clear":
                report.at_least(f"{way}, {label}: ours over the bare client", ratio, FLOOR)
            else:
                report.figures[f"{way}, {label}: encrypted over the bare client"] = ratio


if __name__ == "__main__":
    sys.exit(main())

"""Stores over small pages, an I/O object that fails on demand, and what the disk really holds."""

import os
import random
import threading
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

from sglang_ext.tiering.caps import Caps
from sglang_ext.tiering.encryption import KeyRing
from sglang_ext.tiering.file_io import FileIO
from sglang_ext.tiering.nvme_store import NvmeStore, StoreConfig
from sglang_ext.tiering.page_format import Fingerprint
from sglang_ext.tiering.page_store import PageStore
from sglang_ext.tiering.transfers import PageRef, copy_from, copy_into
from sglang_ext.types import Owner

__all__ = [
    "ALICE",
    "BOB",
    "BODY_BYTES",
    "FINGERPRINT",
    "MASTER",
    "SLOT_BYTES",
    "FakeClock",
    "FaultyIO",
    "body_of",
    "check_books",
    "damage",
    "disk_bytes",
    "disk_bytes_in",
    "finish",
    "flip",
    "get",
    "make_store",
    "put",
    "refs_of",
    "slab_files",
]

ALICE = Owner("t:alice")
BOB = Owner("t:bob")
MASTER = bytes(range(32))
FINGERPRINT = Fingerprint(
    model_id="model", weights_hash="weights", kv_dtype="bf16", layout="layer_first", page_size=16
)
BODY_BYTES = 9000
SLOT_BYTES = 16384
"""Header block and ``BODY_BYTES``, rounded up."""


class FakeClock:
    """Seconds that move only when a test says so."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class FaultyIO(FileIO):
    """The real calls, until a test says otherwise.

    ``errors[call]`` is an errno to raise; ``gate`` holds reads (and ``write_gate`` writes) back
    until it is set, and sets ``held``; ``short`` cuts reads after so many bytes.
    """

    def __init__(self) -> None:
        self.errors: dict[str, int] = {}
        self.gate: threading.Event | None = None
        self.write_gate: threading.Event | None = None
        self.short: int | None = None
        self.held = threading.Event()
        self.reads = 0

    def heal(self) -> None:
        """Let everything go on that is held, and fail no more."""
        self.errors.clear()
        self.short = None
        gates, self.gate, self.write_gate = (self.gate, self.write_gate), None, None
        for gate in gates:
            if gate is not None:
                gate.set()

    def open(self, path: Path, size: int) -> int:
        self._maybe_fail("open")
        return super().open(path, size)

    def read(self, fd: int, view: memoryview, offset: int) -> int:
        self._hold(self.gate)
        self.reads += 1
        self._maybe_fail("read")
        count = super().read(fd, view, offset)
        return count if self.short is None else min(count, self.short)

    def write(self, fd: int, view: memoryview, offset: int) -> None:
        self._hold(self.write_gate)
        self._maybe_fail("write")
        super().write(fd, view, offset)

    def reserve(self, fd: int, offset: int, length: int) -> None:
        self._maybe_fail("reserve")
        super().reserve(fd, offset, length)

    def punch(self, fd: int, offset: int, length: int) -> bool:
        self._maybe_fail("punch")
        return super().punch(fd, offset, length)

    def _hold(self, gate: threading.Event | None) -> None:
        if gate is not None:
            self.held.set()
            gate.wait()

    def _maybe_fail(self, call: str) -> None:
        if call in self.errors:
            raise OSError(self.errors[call], os.strerror(self.errors[call]))


def make_store(
    folder: Path,
    *,
    encrypted: bool = False,
    total: int = 64 * 2**20,
    io: FileIO | None = None,
    clock: Callable[[], float] | None = None,
    caps: Caps | None = None,
    fingerprint: Fingerprint = FINGERPRINT,
    timeout_s: float = 30.0,
) -> NvmeStore:
    """Open a store of depth 4 in ``folder``; all owners encrypted or none."""
    config = StoreConfig(
        folder=folder / "pages",
        fingerprint=fingerprint,
        caps=caps or Caps(total_bytes=total),
        depth=4,
        timeout_s=timeout_s,
        encrypted=lambda owner: encrypted,
    )
    keyring = KeyRing(folder / "keys", MASTER) if encrypted else None
    return NvmeStore(config, keyring, io, clock or FakeClock())


def refs_of(owner: Owner, numbers: Sequence[int]) -> list[PageRef]:
    """Return page references with keys made from integers."""
    return [PageRef(owner, sha256(b"%d" % number).digest()) for number in numbers]


def body_of(ref: PageRef, size: int = BODY_BYTES) -> bytes:
    """Return the only right content of a page."""
    return random.Random(f"{ref.owner}{ref.key.hex()}{size}").randbytes(size)


def put(store: PageStore, refs: Sequence[PageRef], size: int = BODY_BYTES) -> list[bool]:
    """Store pages with their right content."""
    bodies = [memoryview(body_of(ref, size)) for ref in refs]
    return store.put_batch(refs, [size] * len(refs), copy_from(bodies))


def get(
    store: PageStore,
    refs: Sequence[PageRef],
    size: int = BODY_BYTES,
    timeout_s: float | None = None,
) -> list[bool]:
    """Read pages; what is delivered must be right, what is not must be untouched or ignored."""
    buffers = [bytearray(size) for _ in refs]
    found = store.get_batch(refs, copy_into([memoryview(buffer) for buffer in buffers]), timeout_s)
    for ref, buffer, hit in zip(refs, buffers, found, strict=True):
        assert not hit or bytes(buffer) == body_of(ref, size), f"wrong content for {ref}"
    return found


def slab_files(folder: Path) -> list[Path]:
    """Return the files that hold pages, in order."""
    return sorted((folder / "pages" / "slabs").glob("*/*.slab"))


def disk_bytes(folder: Path) -> int:
    """Return what ``du`` shows for the pages of ``make_store``."""
    return sum(path.stat().st_blocks * 512 for path in slab_files(folder))


def disk_bytes_in(folder: Path) -> int:
    """Return what ``du`` shows for the pages of any store below ``folder``."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*.slab"))


def check_books(store: NvmeStore, folder: Path, total: int | None = None) -> None:
    """Assert that the books are right, below the cap, and what ``du`` shows."""
    store.check_integrity()
    usage = store.total_usage().total
    assert total is None or usage <= total
    # Beside its pages a file may hold the tree of its extents.
    assert abs(disk_bytes(folder) - usage) <= 8192 * len(slab_files(folder))


def finish(store: NvmeStore) -> None:
    """Assert that the books are right and the store still works after a fault; close it."""
    fresh = refs_of(BOB, range(900, 904))
    assert all(put(store, fresh))
    assert all(get(store, fresh))
    store.check_integrity()
    store.close()


def damage(path: Path, offset: int, data: bytes) -> None:
    """Overwrite bytes behind the back of a store."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path: Path, offset: int, bit: int) -> None:
    """Change one bit behind the back of a store."""
    with path.open("rb") as file:
        file.seek(offset)
        value = file.read(1)[0]
    damage(path, offset, bytes([value ^ (1 << bit)]))

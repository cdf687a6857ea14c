"""Opens the folder of a store: one server at a time, and the pages that a former run left.

After a clean close the index on disk is trusted. After anything else every header is read: pages
the index knows are taken as they are (their body is checked when it is read), the others are read
whole. What is no whole page of this engine configuration is erased.
"""

import fcntl
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from sglang_ext.errors import StoreError
from sglang_ext.tiering.counters import Counters, reason_of
from sglang_ext.tiering.file_io import FileIO
from sglang_ext.tiering.index_db import IndexDb, Row, Saved
from sglang_ext.tiering.page_format import (
    FORMAT_VERSION,
    HEADER_BYTES,
    Fingerprint,
    PageHeader,
    Reject,
    check_page,
    judge,
    parse_header,
)
from sglang_ext.tiering.page_index import Entry, PageIndex
from sglang_ext.tiering.slabs import Slab, Slabs, Slot
from sglang_ext.tiering.workers import Batch, Workers, scratch
from sglang_ext.types import Owner

__all__ = ["Recovery", "identity", "lock_folder"]

logger = logging.getLogger(__name__)

_CHUNK = 1024
_CHUNK_TIMEOUT_S = 60.0


def identity(fingerprint: Fingerprint) -> str:
    """Return a short name of an engine configuration, for the index on disk."""
    digest = sha256(b"\0".join(fingerprint.groups)).hexdigest()
    return f"{FORMAT_VERSION}:{digest}"


def lock_folder(folder: Path) -> int:
    """Create the folder and lock it for this process; returns the descriptor that holds the lock.

    Nobody but its user may look into it: the index names owners, and hashes of what they sent.

    Raises StoreError when another server has it, or when it cannot be written.
    """
    path = folder / "lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreError(f"NVMe folder {folder}: cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise StoreError(
            f"NVMe folder {folder}: in use by another server (process {holder}); "
            "stop it, or give this one a folder of its own"
        ) from None
    # Only for the message above, and a full disk may refuse it.
    with suppress(OSError):
        os.pwrite(fd, f"{os.getpid():<31}\n".encode(), 0)
    return fd


class _Found(NamedTuple):
    owner: Owner
    key: bytes
    slot: Slot
    last_access: float


class Recovery:
    """Builds the index in memory and frees every slot that it does not name."""

    def __init__(
        self,
        fingerprint: Fingerprint,
        slabs: Slabs,
        io: FileIO,
        workers: Workers,
        counters: Counters,
    ) -> None:
        self._fingerprint = fingerprint
        self._slabs = slabs
        self._io = io
        self._workers = workers
        self._counters = counters

    def run(self, db: IndexDb) -> PageIndex:
        """Return the pages that can be used. Raises OSError or sqlite3.Error if it cannot start."""
        self._slabs.load()
        saved = db.load()
        known = self._placed(saved)
        trusted = saved.trusted and len(known) == len(saved.pages)
        pages = list(known.values()) if trusted else self._scan(known, saved.stuck)
        index = self._occupied(pages)
        self._slabs.restore_stuck(saved.stuck)
        if not trusted:
            self._slabs.sweep()
            db.replace_all([(owner, key, _row(entry)) for owner, key, entry in index])
        self._slabs.drop_empty()
        return index

    def _placed(self, saved: Saved) -> dict[tuple[int, int], _Found]:
        """Pages of the saved index whose slot exists; the later of two that claim one slot."""
        known = {}
        for owner, key, number, slot, last_access in saved.pages:
            slab = self._slabs.get(number)
            if slab is not None and 0 <= slot < slab.slots:
                known[number, slot] = _Found(owner, key, (slab, slot), last_access)
        return known

    def _occupied(self, pages: Iterable[_Found]) -> PageIndex:
        """Build the index, least recently used first; of two copies of a page the later stays."""
        newest = {(page.owner, page.key): page for page in sorted(pages, key=_by_access)}
        index = PageIndex()
        taken: dict[int, set[int]] = {slab.number: set() for slab in self._slabs}
        for page in sorted(newest.values(), key=_by_access):
            index.add(page.owner, page.key, Entry(page.slot, page.last_access))
            slab, slot = page.slot
            taken[slab.number].add(slot)
        for slab in self._slabs:
            self._slabs.occupy(slab, taken[slab.number])
        return index

    def _scan(
        self, known: dict[tuple[int, int], _Found], stuck: set[tuple[int, int]]
    ) -> list[_Found]:
        found: list[_Found] = []

        def look(slot: Slot) -> None:
            page = self._look(slot, known.get(_place(slot)))
            if page is not None:
                found.append(page)

        slots = (slot for slot in self._slots_with_data() if _place(slot) not in stuck)
        while chunk := list(islice(slots, _CHUNK)):
            self._each(chunk, look)
        return list(found)

    def _each(self, slots: list[Slot], look: Callable[[Slot], None]) -> None:
        def work(_: Batch, places: range) -> None:
            look(slots[places[0]])

        batch = Batch(len(slots), work)
        self._workers.start(batch)
        outcome = batch.wait(_CHUNK_TIMEOUT_S)
        if outcome.error is not None:
            raise outcome.error
        if outcome.late:
            self._counters.add("timeout", outcome.late)

    def _look(self, slot: Slot, known: _Found | None) -> _Found | None:
        """Read one slot: its header if the index names the same page, else all of it."""
        slab, number = slot
        try:
            header = self._header(slab, number, whole=False)
            if not isinstance(header, Reject):
                if known is not None and (known.owner, known.key) == (header.owner, header.key):
                    return known
                header = self._header(slab, number, whole=True)
        except OSError as error:
            self._counters.add(reason_of(error))
            return None
        if isinstance(header, Reject):
            if header is not Reject.EMPTY:
                self._counters.add("leftover")
            return None
        self._counters.add("adopted")
        return _Found(header.owner, header.key, slot, header.written_ms / 1000)

    def _header(self, slab: Slab, slot: int, whole: bool) -> PageHeader | Reject:
        page = scratch(slab.slot_bytes if whole else HEADER_BYTES)
        page = page[: self._io.read(slab.fd, page, slab.offset(slot))]
        header = check_page(page) if whole else parse_header(page)
        if isinstance(header, Reject):
            return header
        return judge(header, self._fingerprint, header.owner, header.key) or header

    def _slots_with_data(self) -> Iterator[Slot]:
        for slab in self._slabs:
            for slot in self._with_data(slab):
                yield slab, slot

    def _with_data(self, slab: Slab) -> Iterator[int]:
        """Yield every slot of the file that is not all hole, once, in order."""
        begin = 0
        for start, end in self._io.data_ranges(slab.fd):
            first = max(begin, start // slab.slot_bytes)
            begin = min(-(-end // slab.slot_bytes), slab.slots)
            yield from range(first, begin)


def _by_access(page: _Found) -> float:
    return page.last_access


def _place(slot: Slot) -> tuple[int, int]:
    return slot[0].number, slot[1]


def _row(entry: Entry) -> Row:
    slab, slot = entry.slot
    return Row(slab.number, slot, entry.bytes, entry.last_access)

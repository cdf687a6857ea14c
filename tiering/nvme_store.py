"""Pages on NVMe: bounded, checked, and never an error to the one who asks.

    refs   -> names (blinded for encrypted owners) -> slots -> workers: fill, seal, write -> index
    refs   -> names -> index -> workers: read, check, open -> deliver

A page becomes visible only after its last byte was written, and is checked whole at every read. So
whatever happens in between (kill, full disk, bad disk, foreign file) is a miss and a count.
"""

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sglang_ext.errors import StoreError
from sglang_ext.tiering.caps import Caps, VictimOrder, furthest_above_share
from sglang_ext.tiering.codec import PageCodec
from sglang_ext.tiering.counters import Counters
from sglang_ext.tiering.encryption import KeyRing
from sglang_ext.tiering.file_io import FileIO
from sglang_ext.tiering.index_db import IndexDb, IndexWriter
from sglang_ext.tiering.page_format import Fingerprint
from sglang_ext.tiering.page_index import PageIndex
from sglang_ext.tiering.page_store import PageStore
from sglang_ext.tiering.recovery import Recovery, identity, lock_folder
from sglang_ext.tiering.slabs import Slabs
from sglang_ext.tiering.space import Space
from sglang_ext.tiering.transfers import Deliver, Fill, PageRef, Transfers
from sglang_ext.tiering.workers import Workers, measure_depth
from sglang_ext.types import Owner

__all__ = ["NvmeStore", "StoreConfig", "Usage"]

logger = logging.getLogger(__name__)

_PAGES_PER_LOCK = 256
"""Deleting many pages lets readers in between."""


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """Where the pages of one engine process lie and how much they may take.

    ``depth`` pages are read or written at a time (None: measured at open). A batch that takes
    longer than ``timeout_s`` ends with misses. ``encrypted`` tells which owners' pages are sealed.
    """

    folder: Path
    fingerprint: Fingerprint
    caps: Caps
    depth: int | None = None
    timeout_s: float = 5.0
    encrypted: Callable[[Owner], bool] = lambda owner: False
    order: VictimOrder = furthest_above_share


class Usage(NamedTuple):
    """Bytes on disk, headers and rounding included; ``du`` of the slab files shows ``total``."""

    owners: Mapping[Owner, int]
    idle: int
    """Reserved for pages to come, being written, or in slots that cannot be freed."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.owners.values()) + self.idle


class NvmeStore(PageStore):
    """A folder of pages for one engine process. Thread-safe. Only opening raises."""

    def __init__(
        self,
        config: StoreConfig,
        keyring: KeyRing | None = None,
        io: FileIO | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the folder and find the pages of the last run.

        Raises StoreError when another server has the folder or it cannot be written. After a clean
        close this costs one read of the index; otherwise one small read for each page.
        """
        self._io = io or FileIO()
        self._clock = clock
        self._timeout_s = config.timeout_s
        self._counters = Counters()
        self._lock = threading.Lock()
        self._closed = False
        self._codec = PageCodec(config.fingerprint, keyring, config.encrypted)
        self._lock_fd = lock_folder(config.folder)
        depth = config.depth or measure_depth(config.folder, self._io)
        self._workers = Workers(depth)
        self._slabs = Slabs(config.folder / "slabs", self._io, config.caps.total_bytes)
        self._db = IndexDb(config.folder, identity(config.fingerprint))
        index = self._recover(config)
        self._writer = IndexWriter(self._db, lambda: self._counters.add("index_error"))
        self._space = Space(
            self._slabs, index, self._writer, self._counters, config.caps, config.order
        )
        self._transfers = Transfers(
            self._space,
            self._lock,
            self._codec,
            self._workers,
            self._io,
            self._counters,
            clock,
        )
        self.set_caps(config.caps)

    @property
    def counters(self) -> Mapping[str, int]:
        """Counts since open: ``hit``, ``miss``, ``stored``, ``evicted``, each reason of loss."""
        return self._counters.snapshot()

    @property
    def depth(self) -> int:
        """How many pages are read or written at the same time."""
        return self._workers.depth

    def put_batch(
        self,
        refs: Sequence[PageRef],
        sizes: Sequence[int],
        fill: Fill,
        timeout_s: float | None = None,
    ) -> list[bool]:
        """Store pages of ``sizes`` bytes whose bodies ``fill`` writes.

        True for each page that is stored now or was before; False for one that the caps, the disk,
        the key or the deadline refused. Nothing of the caller's memory is used after return.
        """
        if self._closed:
            return [False] * len(refs)
        return self._transfers.put(refs, sizes, fill, self._timeout(timeout_s))

    def get_batch(
        self, refs: Sequence[PageRef], deliver: Deliver, timeout_s: float | None = None
    ) -> list[bool]:
        """Read pages and hand the body of each to ``deliver``; True for each that was handed over.

        Everything else is a miss: absent, refused by a check (and deleted), or late. Nothing of
        the caller's memory is touched after return.
        """
        if self._closed:
            return [False] * len(refs)
        return self._transfers.get(refs, deliver, self._timeout(timeout_s))

    def contains_batch(self, refs: Sequence[PageRef]) -> list[bool]:
        """Tell which pages are there, from memory alone; a later read may still miss."""
        names = self._transfers.names(refs, writing=False)
        find = self._space.index.find
        with self._lock:
            return [
                not self._closed and name is not None and find(ref.owner, name) is not None
                for ref, name in zip(refs, names, strict=True)
            ]

    def owners(self) -> list[Owner]:
        """Return the owners that hold a page."""
        with self._lock:
            return self._space.index.owners()

    def delete(self, refs: Sequence[PageRef]) -> int:
        """Delete pages, also those being written; returns the bytes that became free on disk."""
        names = self._transfers.names(refs, writing=False)
        return sum(
            self._delete(ref.owner, [name])
            for ref, name in zip(refs, names, strict=True)
            if name is not None
        )

    def delete_owner(self, owner: Owner) -> int:
        """Delete every page of ``owner``; returns the bytes freed. O(pages of the owner).

        The owner's key stays: ``KeyRing.destroy`` first, where pages must never be readable again.
        """
        with self._lock:
            self._transfers.cancel_writes(owner)
            names = self._space.index.keys(owner)
        chunks = range(0, len(names), _PAGES_PER_LOCK)
        return sum(self._delete(owner, names[at : at + _PAGES_PER_LOCK]) for at in chunks)

    def expire(self, owner: Owner, before: float) -> int:
        """Delete the pages of ``owner`` last used before that time; returns the bytes freed.

        O(expired): stops at the first page, in order of use, that is young enough.
        """
        freed = 0
        while True:
            with self._lock:
                key, entry = next(self._space.index.oldest(owner), (b"", None))
                if self._closed or entry is None or entry.last_access >= before:
                    return freed
                freed += self._space.drop(owner, key)

    def rebind(self, fingerprint: Fingerprint) -> None:
        """Go on with other weights: delete every page and accept none of the former engine."""
        self._codec.fingerprint = fingerprint
        self._db.identity = identity(fingerprint)
        for owner in self.owners():
            self.delete_owner(owner)

    def keep_age(self, owners: Iterable[Owner]) -> None:
        """Let no use renew the pages of ``owners``: they age, and leave, by when they came."""
        with self._lock:
            self._space.fixed = frozenset(owners)

    def last_access(self, ref: PageRef) -> float | None:
        """Return when a page was used last (with ``keep_age``: stored); None where it is not."""
        (name,) = self._transfers.names([ref], writing=False)
        with self._lock:
            entry = None if name is None else self._space.index.find(ref.owner, name)
            return None if entry is None else entry.last_access

    def set_caps(self, caps: Caps) -> None:
        """Use other caps from now on, and evict what is above them."""
        with self._lock:
            self._space.caps = caps
            self._space.shrink()

    def usage(self, owner: Owner) -> int:
        """Return the bytes on disk of one owner."""
        with self._lock:
            return self._space.index.usage.get(owner, 0)

    def total_usage(self) -> Usage:
        """Return the bytes on disk of everybody."""
        with self._lock:
            owners = dict(self._space.index.usage)
            return Usage(owners, self._space.used_bytes - sum(owners.values()))

    def flush(self) -> None:
        """Commit the index on disk now; a kill after this costs a scan but no recency."""
        self._writer.flush()

    def check_integrity(self) -> None:
        """Assert every invariant of the books; for tests. O(slots)."""
        with self._lock:
            self._space.check_integrity()

    def close(self) -> None:
        """Finish what runs, save the index and free the folder; later calls miss.

        When a read or write is still stuck after the timeout, the folder stays locked until this
        process ends, so that the late write meets nobody else's page.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        stopped = self._workers.stop(self._timeout_s)
        if stopped:
            self._slabs.trim()
        self._writer.note_stuck(self._slabs.stuck)
        self._writer.close(clean=stopped)
        if stopped:
            self._release()

    def _recover(self, config: StoreConfig) -> PageIndex:
        recovery = Recovery(
            config.fingerprint, self._slabs, self._io, self._workers, self._counters
        )
        try:
            return recovery.run(self._db)
        except (OSError, sqlite3.Error) as error:
            self._workers.stop(self._timeout_s)
            self._release()
            raise StoreError(f"NVMe folder {config.folder}: cannot be opened: {error}") from error

    def _release(self) -> None:
        self._slabs.close()
        self._io.close(self._lock_fd)

    def _delete(self, owner: Owner, names: list[bytes]) -> int:
        with self._lock:
            if self._closed:
                return 0
            for name in names:
                self._transfers.cancel_writes(PageRef(owner, name))
            find = self._space.index.find
            return sum(
                self._space.drop(owner, name) for name in names if find(owner, name) is not None
            )

    def _timeout(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else timeout_s

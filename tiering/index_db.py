"""The index on disk: a SQLite database (WAL) that a thread of its own follows up in batches.

It only saves a restart from reading every page header. Whoever opens the folder trusts it after a
clean close alone: a random word is then both in the database and in a file beside it, and the file
goes away at the next start. Anything else (killed, deleted, damaged, an old copy) means a scan.
"""

import contextlib
import logging
import os
import secrets
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from sglang_ext.types import Owner

__all__ = ["IndexDb", "IndexWriter", "Row", "Saved"]

logger = logging.getLogger(__name__)

_FILE = "index.sqlite"
_CLEAN_FILE = "clean"
_COMMIT_INTERVAL_S = 0.5
_SCHEMA = """
CREATE TABLE IF NOT EXISTS pages (
    owner TEXT NOT NULL, key BLOB NOT NULL, slab INTEGER NOT NULL, slot INTEGER NOT NULL,
    bytes INTEGER NOT NULL, last_access REAL NOT NULL, PRIMARY KEY (owner, key)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS stuck (slab INTEGER, slot INTEGER, PRIMARY KEY (slab, slot));
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT);
"""
_SELECT = "SELECT owner, key, slab, slot, last_access FROM pages ORDER BY last_access"
_UPSERT = "INSERT OR REPLACE INTO pages VALUES (?, ?, ?, ?, ?, ?)"


class Row(NamedTuple):
    """One page as the database knows it."""

    slab: int
    slot: int
    bytes: int
    last_access: float


class Saved(NamedTuple):
    """What a former run left: pages in order of last access, and slots that were stuck."""

    pages: list[tuple[Owner, bytes, int, int, float]]
    stuck: set[tuple[int, int]]
    trusted: bool
    """Closed cleanly by the same engine configuration, so that no scan is needed."""


class IndexDb:
    """The database file; every method may raise sqlite3.Error unless it says otherwise."""

    def __init__(self, folder: Path, identity: str) -> None:
        self._path = folder / _FILE
        self._clean = folder / _CLEAN_FILE
        self.identity = identity
        self._db: sqlite3.Connection | None = None
        self._whole = True
        """No write of this run was refused, so that the database may tell the whole truth."""

    def load(self) -> Saved:
        """Open the database and read all of it; a missing or damaged one is replaced by a new one.

        Never raises for what the database contains, nor when there is no room for a new one.
        """
        word = self._clean.read_text() if self._clean.exists() else ""
        self._clean.unlink(missing_ok=True)
        try:
            return self._read(word)
        except (sqlite3.DatabaseError, ValueError, TypeError) as error:
            logger.warning("the index %s is damaged (%s): scanning the pages", self._path, error)
        self._discard()
        try:
            return self._read("")
        except sqlite3.Error as error:
            self._give_up(error)
        return Saved([], set(), trusted=False)

    def replace_all(self, pages: list[tuple[Owner, bytes, Row]]) -> None:
        """Make the database say exactly this, after a scan; never raises for want of room."""
        try:
            db = self._open()
            with db:
                db.execute("DELETE FROM pages")
                db.executemany(_UPSERT, [(owner, key, *row) for owner, key, row in pages])
        except sqlite3.Error as error:
            self._give_up(error)

    def apply(
        self, changes: dict[tuple[Owner, bytes], Row | None], stuck: set[tuple[int, int]]
    ) -> None:
        """Commit changed pages (None: gone) and the slots that are stuck, in one transaction."""
        gone = [page for page, row in changes.items() if row is None]
        kept = [(*page, *row) for page, row in changes.items() if row is not None]
        db = self._open()
        with db:
            db.executemany("DELETE FROM pages WHERE owner = ? AND key = ?", gone)
            db.executemany(_UPSERT, kept)
            db.execute("DELETE FROM stuck")
            db.executemany("INSERT INTO stuck VALUES (?, ?)", stuck)

    def close(self, clean: bool) -> None:
        """Close the database, and say so in both places when it tells the whole truth."""
        db, self._db = self._open(), None
        word = secrets.token_hex(16)
        clean = clean and self._whole
        if clean:
            with db:
                says = [("clean", word), ("identity", self.identity)]
                db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", says)
        db.close()
        if clean:
            _sync(self._path)
            self._clean.write_text(word)

    def _read(self, word: str) -> Saved:
        db = self._open()
        with db:
            db.executescript(_SCHEMA)
        meta = dict(db.execute("SELECT name, value FROM meta"))
        trusted = word != "" and meta.get("clean") == word
        trusted = trusted and meta.get("identity") == self.identity
        pages = [
            (Owner(str(owner)), bytes(key), int(slab), int(slot), float(last_access))
            for owner, key, slab, slot, last_access in db.execute(_SELECT)
        ]
        rows = db.execute("SELECT slab, slot FROM stuck")
        stuck = {(int(slab), int(slot)) for slab, slot in rows}
        return Saved(pages, stuck, trusted)

    def _open(self) -> sqlite3.Connection:
        if self._db is None:
            self._db = sqlite3.connect(self._path, check_same_thread=False)
            # Only a clean close is trusted, and that syncs by itself: no commit needs to wait.
            self._db.execute("PRAGMA synchronous = OFF")
            self._db.execute("PRAGMA journal_mode = WAL")
        return self._db

    def _give_up(self, error: sqlite3.Error) -> None:
        logger.warning("cannot write the index %s (%s): the next start scans", self._path, error)
        self._whole = False

    def _discard(self) -> None:
        if self._db is not None:
            with contextlib.suppress(sqlite3.Error):
                self._db.close()
            self._db = None
        for suffix in ("", "-wal", "-shm"):
            self._path.with_name(_FILE + suffix).unlink(missing_ok=True)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


class IndexWriter:
    """Collects changes and commits them from its own thread, so that no read waits for SQLite."""

    def __init__(self, db: IndexDb, on_error: Callable[[], None]) -> None:
        self._db = db
        self._on_error = on_error
        self._changes: dict[tuple[Owner, bytes], Row | None] = {}
        self._stuck: set[tuple[int, int]] = set()
        self._lock = threading.Lock()
        self._commit_lock = threading.Lock()
        self._stop = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._loop, name="sglang-ext-index", daemon=True)
        self._thread.start()

    def note(self, owner: Owner, key: bytes, row: Row | None) -> None:
        """Remember that a page changed (None: gone); O(1), nothing is written yet."""
        with self._lock:
            self._changes[owner, key] = row

    def note_stuck(self, stuck: set[tuple[int, int]]) -> None:
        """Remember which slots are stuck now."""
        with self._lock:
            self._stuck = set(stuck)

    def flush(self) -> bool:
        """Commit what is remembered; False when the database refuses.

        After one failure the database is not trusted again: the next start scans.
        """
        with self._commit_lock:
            with self._lock:
                changes, self._changes = self._changes, {}
                stuck = self._stuck
            try:
                self._db.apply(changes, stuck)
            except sqlite3.Error as error:
                logger.warning("cannot write the page index: %s", error)
                self._failed = True
                self._on_error()
            return not self._failed

    def close(self, clean: bool) -> None:
        """Commit the rest and close; never raises."""
        self._stop.set()
        self._thread.join()
        whole = self.flush()
        try:
            self._db.close(clean and whole)
        except (sqlite3.Error, OSError) as error:
            logger.warning("cannot close the page index: %s", error)
            self._on_error()

    def _loop(self) -> None:
        while not self._stop.wait(_COMMIT_INTERVAL_S):
            with self._lock:
                idle = not self._changes
            if not idle:
                self.flush()

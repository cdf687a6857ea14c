"""Usage by hour and tenant in one SQLite file: added exactly once, whatever is killed when.

Several processes, and several runs, add to one file. Each has a name of its own and numbers its
batches; a batch and its number are one transaction, so that writing it again changes nothing.
"""

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from sglang_ext.errors import UsageError
from sglang_ext.observe.reuse import COLUMNS

__all__ = ["AMOUNTS", "HOUR", "Batch", "Cell", "UsageStore"]

HOUR = 3600

AMOUNTS = (
    "requests",
    "prompt_tokens",
    "cached_hbm_tokens",
    "cached_cpu_tokens",
    "cached_nvme_tokens",
    "computed_tokens",
    "output_tokens",
    "hbm_token_seconds",
    "cpu_token_seconds",
    "nvme_token_seconds",
    *COLUMNS,
)
"""What is counted. Whole numbers, but for token-seconds: tokens held times seconds."""

_VERSION = 2
_WITHOUT_REUSE = 1
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS usage (
    hour INTEGER NOT NULL, tenant TEXT NOT NULL,
    {", ".join(f"{name} NOT NULL DEFAULT 0" for name in AMOUNTS)},
    PRIMARY KEY (hour, tenant)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS writers (name TEXT PRIMARY KEY, batch INTEGER NOT NULL) WITHOUT ROWID;
"""
_ADD = (
    f"INSERT INTO usage (hour, tenant, {', '.join(AMOUNTS)}) "
    f"VALUES (?, ?, {', '.join('?' * len(AMOUNTS))}) ON CONFLICT (hour, tenant) DO UPDATE SET "
    + ", ".join(f"{name} = {name} + excluded.{name}" for name in AMOUNTS)
)
_NUMBER = (
    "INSERT INTO writers VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET batch = excluded.batch"
)
_BUSY_MS = 5000


class Cell(NamedTuple):
    """Whose amounts, and of which hour (its first second, Unix time)."""

    hour: int
    tenant: str


Batch = Mapping[Cell, Mapping[str, float]]
"""Amounts to add, by cell and by name (see AMOUNTS)."""


class UsageStore:
    """The usage file. Every method may raise sqlite3.Error, and then has changed nothing or, only
    in ``add``, all of it: add again. One thread at a time."""

    def __init__(self, path: Path) -> None:
        """Open or create the file; raises UsageError where that cannot be."""
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
            self._db.execute("PRAGMA journal_mode = WAL")
            # A batch is on the disk when ``add`` returns, not only in the system's cache.
            self._db.execute("PRAGMA synchronous = FULL")
            self._create(path)
        except sqlite3.Error as error:
            raise UsageError(f"usage file {path}: {error}") from error

    def _create(self, path: Path) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version not in (0, _WITHOUT_REUSE, _VERSION):
            raise UsageError(
                f"usage file {path}: format {version}, expected {_VERSION}; another release of "
                "sglang_ext wrote it, name another file"
            )
        try:
            self._db.executescript(f"BEGIN IMMEDIATE;{_SCHEMA}")
            # A file of format 1 lacks what was added since; a server of then may still write it.
            held = {row[1] for row in self._db.execute("PRAGMA table_info(usage)")}
            for name in AMOUNTS:
                if name not in held:
                    self._db.execute(f"ALTER TABLE usage ADD COLUMN {name} NOT NULL DEFAULT 0")
            self._db.execute(f"PRAGMA user_version = {_VERSION}")
            self._db.execute("COMMIT")
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def add(self, writer: str, number: int, batch: Batch) -> None:
        """Add a batch, unless ``writer`` has already added one of this number or above.

        ``number`` counts up from 1. All or nothing; after an error, call again with the same.
        """
        try:
            self._db.execute("BEGIN IMMEDIATE")
            if self._last(writer) < number:
                self._db.executemany(_ADD, map(_row, batch, batch.values()))
                self._db.execute(_NUMBER, (writer, number))
            self._db.execute("COMMIT")
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def _last(self, writer: str) -> int:
        found = self._db.execute("SELECT batch FROM writers WHERE name = ?", (writer,)).fetchone()
        return int(found[0]) if found else 0

    def read(self, start: float, end: float) -> list[tuple[Cell, dict[str, float]]]:
        """Return the amounts of every hour that begins in ``[start, end)``, by hour and tenant."""
        names = ", ".join(AMOUNTS)
        query = f"SELECT hour, tenant, {names} FROM usage WHERE hour >= ? AND hour < ?"
        rows = self._db.execute(f"{query} ORDER BY hour, tenant", (start, end))
        return [
            (Cell(hour, tenant), dict(zip(AMOUNTS, amounts, strict=True)))
            for hour, tenant, *amounts in rows
        ]

    def close(self) -> None:
        """Close the file."""
        self._db.close()


def _row(cell: Cell, amounts: Mapping[str, float]) -> tuple[int | float | str, ...]:
    return (*cell, *(amounts.get(name, 0) for name in AMOUNTS))

"""Collects usage in memory and writes it every few seconds, off the path of requests.

finished requests   process that serves HTTP   prompt, cached by tier, computed and output tokens
token-seconds       scheduler                  what owners held, times how long
reuse               scheduler                  prompt tokens that came back, by how long they lay

What a killed process had not written is lost: at most FLUSH_SECONDS and the time of one write.
"""

import logging
import sqlite3
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from sglang_ext.observe.usage_store import HOUR, Cell, UsageStore
from sglang_ext.types import Owner, Tier

if TYPE_CHECKING:
    from sglang_ext.metrics import FinishedRequest

__all__ = ["FLUSH_SECONDS", "HeldUsage", "UsageRecorder", "payer"]

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 5.0


class UsageRecorder:
    """Adds up amounts by hour and tenant until the next write. Thread-safe.

    ``on_error`` is called for every write that failed; what it held is kept and tried again.
    """

    def __init__(
        self,
        store: UsageStore,
        clock: Callable[[], float] = time.time,
        on_error: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._on_error = on_error
        self._writer = uuid.uuid4().hex
        self._number = 1
        self._pending: dict[Cell, Counter[str]] = {}
        self._unwritten: dict[Cell, Counter[str]] = {}
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._stopped = threading.Event()

    def start(self) -> None:
        """Write every FLUSH_SECONDS from now on, in a thread."""
        threading.Thread(target=self._run, name="usage", daemon=True).start()

    def finished(self, request: "FinishedRequest") -> None:
        """Add a finished request to the hour in which it ended. O(1)."""
        amounts = {
            "requests": 1,
            "prompt_tokens": request.prompt,
            "computed_tokens": request.computed,
            "output_tokens": request.output,
        }
        amounts |= {f"cached_{tier}_tokens": tokens for tier, tokens in request.cached.items()}
        self.add(request.tenant, self._clock(), amounts)

    def add(self, tenant: str, when: float, amounts: Mapping[str, float]) -> None:
        """Add ``amounts`` (see AMOUNTS) to the hour of ``when`` (Unix time). O(1)."""
        cell = Cell(int(when // HOUR) * HOUR, tenant)
        with self._lock:
            self._pending.setdefault(cell, Counter()).update(amounts)

    def flush(self) -> bool:
        """Write what was added; False where that failed, and it will be tried again."""
        with self._writing:
            while self._take():
                try:
                    self._store.add(self._writer, self._number, self._unwritten)
                except sqlite3.Error as error:
                    logger.warning("usage was not written, and will be later: %s", error)
                    self._on_error()
                    return False
                self._number += 1
                self._unwritten = {}
        return True

    def read(self, start: float, end: float) -> list[tuple[Cell, dict[str, float]]]:
        """Return what is written of the hours that begin in ``[start, end)``; flush first."""
        with self._writing:
            return self._store.read(start, end)

    def _take(self) -> bool:
        """Make sure that ``_unwritten`` is the next batch; a batch never changes once numbered."""
        if not self._unwritten:
            with self._lock:
                self._unwritten, self._pending = self._pending, {}
        return bool(self._unwritten)

    def close(self) -> None:
        """Write what is left and end the thread; the store stays open."""
        self._stopped.set()
        self.flush()

    def _run(self) -> None:
        while not self._stopped.wait(FLUSH_SECONDS):
            self.flush()


class HeldUsage:
    """Turns token-seconds that only grow, by owner and tier, into usage of hours."""

    def __init__(self, recorder: UsageRecorder, clock: Callable[[], float] = time.time) -> None:
        self._recorder = recorder
        self._clock = clock
        self._seen: dict[tuple[Owner, Tier], float] = {}
        self._since = clock()

    def publish(self, totals: Mapping[tuple[Owner, Tier], float]) -> None:
        """Add what grew since the last time, spread evenly over the hours since. O(owners)."""
        now = self._clock()
        parts = list(_hours(self._since, now))
        for key, total in totals.items():
            grown = total - self._seen.get(key, 0.0)
            self._seen[key] = total
            if grown <= 0:
                continue
            owner, tier = key
            for when, part in parts:
                amounts = {f"{tier.value}_token_seconds": grown * part}
                self._recorder.add(payer(owner), when, amounts)
        self._since = max(now, self._since)

    def reused(self, tenant: str, amounts: Mapping[str, int]) -> None:
        """Add what ``observe.reuse`` says of a prompt of ``tenant``, to this hour. O(1)."""
        if amounts:
            self._recorder.add(tenant, self._clock(), amounts)


def payer(owner: Owner) -> str:
    """Return whom an owner's pages are booked to: a tenant, ``group:<name>``, or ``public``."""
    kind, _, name = owner.partition(":")
    return {"t": name, "g": f"group:{name}"}.get(kind, "public")


def _hours(start: float, end: float) -> Iterator[tuple[float, float]]:
    """Split a time into its hours: a moment of each, and its part of the whole."""
    if end <= start:
        yield end, 1.0
        return
    moment = start
    while moment < end:
        after = min(end, (moment // HOUR + 1) * HOUR)
        yield moment, (after - moment) / (end - start)
        moment = after

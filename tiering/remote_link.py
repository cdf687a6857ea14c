"""Questions to the shared store: on threads of their own, and never waited for long."""

import time
from collections.abc import Callable
from typing import TypeVar

from sglang_ext.tiering.counters import Counters
from sglang_ext.tiering.remote_breaker import Breaker
from sglang_ext.tiering.remote_objects import StoreSilent
from sglang_ext.tiering.workers import Batch, Workers

__all__ = ["Link"]

T = TypeVar("T")

_WIDTH = 1
"""So many threads work on one batch. More only get into each other's way, measured on two cores
over loopback; the others are there for other batches and questions."""

_NICENESS = 5
"""Mooncake's client spins while it waits for a transfer, so these threads give way to those that
move the bytes, and to the model's. No more, as they hold the interpreter's lock at times."""


class Link:
    """The threads that talk to the store, and whether it is worth talking to. Thread-safe.

    Counts ``silent`` for a store that does not answer, and ``timeout`` for one that is too slow.
    """

    def __init__(self, depth: int, timeout_s: float, counters: Counters) -> None:
        self.timeout_s = timeout_s
        self.breaker = Breaker(time.monotonic)
        self._workers = Workers(depth, _NICENESS)
        self._counters = counters
        self._stopped = False

    @property
    def is_open(self) -> bool:
        """Whether pages may be asked for: the last answer was good."""
        return self.breaker.is_closed and not self._stopped

    def ask(self, question: Callable[[], T]) -> T | None:
        """Return the answer; None where there is none in time."""
        if self._stopped or not self.breaker.allows():
            return None
        answers: list[T] = []

        def work(batch: Batch, places: range) -> None:
            answer = self.try_now(question)
            if answer is not None:
                answers.append(answer)

        self._wait(Batch(1, work), self.timeout_s)
        if answers:
            self.breaker.worked()
        return answers[0] if answers else None

    def tell(self, work: Callable[[], object], otherwise: Callable[[], None]) -> None:
        """Do something without waiting for it; ``otherwise`` where the store is silent."""

        def run(batch: Batch, places: range) -> None:
            if self.try_now(work) is None:
                otherwise()

        self._workers.start(Batch(1, run), 1)

    def try_now(self, question: Callable[[], T]) -> T | None:
        """Ask on this thread; None where the store is silent."""
        try:
            return question()
        except StoreSilent as error:
            self._counters.add("silent")
            self.breaker.failed(str(error))
            return None

    def share(
        self, work: Callable[[Batch, range], None], count: int, together: int, timeout_s: float
    ) -> None:
        """Let threads share ``count`` pages, ``together`` at a time.

        Raises what a callback of the caller raised.
        """
        if count:
            self._wait(Batch(count, work, together), timeout_s, _WIDTH)

    def stop(self) -> bool:
        """Ask nothing more; False when a thread is still stuck after the timeout."""
        self._stopped = True
        return self._workers.stop(self.timeout_s)

    def _wait(self, batch: Batch, timeout_s: float, most: int = 1) -> None:
        self._workers.start(batch, most)
        outcome = batch.wait(timeout_s)
        if outcome.late:
            self._counters.add("timeout", outcome.late)
            self.breaker.failed(f"{outcome.late} pages were not done in time")
        if outcome.error is not None:
            raise outcome.error

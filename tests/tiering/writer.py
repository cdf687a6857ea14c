"""A process that forks writers, each of which kills itself in the middle of a system call.

For every line ``folder seed last_call encrypted slots`` on standard input, a child opens the store
and puts, deletes and evicts pages until its ``last_call``-th call, which it does half and then dies
by SIGKILL. Standard output gets a line before and after each batch (``putting``, ``stored``,
``deleting``, ``deleted``, then owner and numbers), and at last ``end`` and the signal.
"""

import os
import random
import signal
import sys
import threading
from pathlib import Path

from sglang_ext.tiering.file_io import FileIO
from sglang_ext.tiering.nvme_store import NvmeStore
from sglang_ext.types import Owner
from tests.tiering.stores import ALICE, BOB, SLOT_BYTES, make_store, put, refs_of

__all__ = ["PAGES"]

PAGES = 60
"""Pages of each owner that a writer chooses from."""


class DyingIO(FileIO):
    """Counts calls; the last one writes a part of its page, then the process is gone."""

    def __init__(self, last_call: int, dice: random.Random) -> None:
        self._left = last_call
        self._dice = dice
        self._lock = threading.Lock()

    def write(self, fd: int, view: memoryview, offset: int) -> None:
        if self._is_last():
            cut = self._dice.randrange(0, len(view) + 1, 4096)
            super().write(fd, view[:cut], offset)
            die()
        super().write(fd, view, offset)

    def reserve(self, fd: int, offset: int, length: int) -> None:
        super().reserve(fd, offset, length)
        if self._is_last():
            die()

    def punch(self, fd: int, offset: int, length: int) -> bool:
        if self._is_last():
            die()
        return super().punch(fd, offset, length)

    def _is_last(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left == 0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def work(store: NvmeStore, dice: random.Random) -> None:
    """Put and delete for ever, and say on standard output what is done."""
    while True:
        owner: Owner = dice.choice([ALICE, BOB])
        numbers = dice.sample(range(PAGES), 5)
        refs = refs_of(owner, numbers)
        if dice.random() < 0.25:
            tell("deleting", owner, numbers)
            store.delete(refs)
            tell("deleted", owner, numbers)
        else:
            tell("putting", owner, numbers)
            put(store, refs)
            tell("stored", owner, numbers)
        if dice.random() < 0.2:
            store.flush()


def tell(verb: str, owner: Owner, numbers: list[int]) -> None:
    line = " ".join([verb, owner, *map(str, numbers)]) + "\n"
    os.write(1, line.encode())


def child(line: str) -> None:
    folder, seed, last_call, encrypted, slots = line.split()
    dice = random.Random(int(seed))
    io = DyingIO(int(last_call), dice)
    total = int(slots) * SLOT_BYTES
    store = make_store(Path(folder), encrypted=encrypted == "1", total=total, io=io)
    work(store, dice)


def main() -> None:
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            child(line)
        status = os.waitpid(pid, 0)[1]
        os.write(1, b"end %d\n" % os.WTERMSIG(status))


if __name__ == "__main__":
    main()

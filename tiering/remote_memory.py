"""The shared store in memory, for tests: clients share a ``Shelf``, which fails on demand."""

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence

from sglang_ext.tiering.remote_objects import Reply, StoreSilent

__all__ = ["MemoryObjects", "Shelf"]


class Shelf:
    """What all clients see, and the faults that a test asks for.

    ``silent``: nothing answers. ``gate``: every transfer waits until it is set. ``capacity_bytes``:
    the oldest objects go when there is no room, unless ``evicts`` is off. ``lost``: names whose
    machine does not answer.
    """

    def __init__(self, capacity_bytes: int = 2**40) -> None:
        self.objects: OrderedDict[str, bytes] = OrderedDict()
        self.capacity_bytes = capacity_bytes
        self.evicts = True
        self.silent = False
        self.lost: set[str] = set()
        self.gate: threading.Event | None = None
        self.held = threading.Event()
        self.transfers = 0
        """Objects that went over the link, either way."""
        self.lock = threading.Lock()

    def fail_if_silent(self) -> None:
        """Raise what a client sees of a store that is gone."""
        if self.silent:
            raise StoreSilent("switched off")

    def wait(self) -> None:
        """Be as slow as the test wants."""
        gate = self.gate
        if gate is not None:
            self.held.set()
            gate.wait()

    def keep(self, name: str, value: bytes) -> Reply:
        """Store one object, unless the name is taken; the caller holds the lock."""
        if name in self.objects:
            return Reply.DONE
        while self.objects and self.evicts and not self._fits(value):
            self.objects.popitem(last=False)
        if not self._fits(value):
            return Reply.FULL
        self.objects[name] = value
        return Reply.DONE

    def flip(self, name: str, offset: int, bit: int = 0) -> None:
        """Change one bit of an object."""
        changed = bytearray(self.objects[name])
        changed[offset] ^= 1 << bit
        self.objects[name] = bytes(changed)

    def _fits(self, value: bytes) -> bool:
        return sum(map(len, self.objects.values())) + len(value) <= self.capacity_bytes


class MemoryObjects:
    """One client of a shelf."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    def buffer(self, size: int) -> memoryview:
        return memoryview(bytearray(size))

    def put(self, names: Sequence[str], values: Sequence[memoryview]) -> list[Reply]:
        shelf = self._shelf
        shelf.wait()
        with shelf.lock:
            shelf.fail_if_silent()
            shelf.transfers += len(names)
            return [
                Reply.LOST if name in shelf.lost else shelf.keep(name, bytes(value))
                for name, value in zip(names, values, strict=True)
            ]

    def get(self, names: Sequence[str], targets: Sequence[memoryview]) -> list[int | Reply]:
        shelf = self._shelf
        shelf.wait()
        with shelf.lock:
            shelf.fail_if_silent()
            return [self._read(*each) for each in zip(names, targets, strict=True)]

    def exist(self, names: Sequence[str]) -> list[bool]:
        with self._shelf.lock:
            self._shelf.fail_if_silent()
            return [name in self._shelf.objects for name in names]

    def remove(self, names: Sequence[str]) -> int:
        with self._shelf.lock:
            self._shelf.fail_if_silent()
            return sum(self._shelf.objects.pop(name, None) is not None for name in names)

    def remove_matching(self, pattern: str) -> int:
        with self._shelf.lock:
            self._shelf.fail_if_silent()
            found = [name for name in self._shelf.objects if re.fullmatch(pattern, name)]
            for name in found:
                del self._shelf.objects[name]
            return len(found)

    def names(self) -> list[str]:
        with self._shelf.lock:
            self._shelf.fail_if_silent()
            return list(self._shelf.objects)

    def close(self) -> None:
        pass

    def _read(self, name: str, target: memoryview) -> int | Reply:
        value = self._shelf.objects.get(name)
        if value is None:
            return Reply.ABSENT
        if name in self._shelf.lost:
            return Reply.LOST
        if len(value) > len(target):
            return Reply.FAILED
        self._shelf.transfers += 1
        target[: len(value)] = value
        return len(value)

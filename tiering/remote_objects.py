"""What the REMOTE tier asks of a store that several machines share: named, immutable objects.

    names, buffers -> a ``Reply`` or a byte count for each name, or ``StoreSilent`` for all at once

Implementations: ``remote_memory`` (for tests, fails on demand) and ``remote_mooncake``.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

__all__ = ["Objects", "Reply", "StoreSilent"]


class Reply(StrEnum):
    """What became of one object. Also the name of the counter that tells so."""

    DONE = "done"
    ABSENT = "absent"
    FULL = "full"
    """No machine of the store has room, or none is there at all."""
    LOST = "lost"
    """The machine that holds it, or was to hold it, does not answer."""
    FAILED = "failed"


class StoreSilent(Exception):
    """The store as a whole does not answer; the call had no effect that can be relied on."""


class Objects(Protocol):
    """Thread-safe. Every method but ``buffer`` may raise StoreSilent.

    An object never changes: what is put under a name that is taken is thrown away, and the answer
    is DONE. So the first of two writers on two machines wins, and both read the same afterwards.
    """

    def buffer(self, size: int) -> memoryview:
        """Return ``size`` zeroed bytes from and to which objects move without a copy."""

    def put(self, names: Sequence[str], values: Sequence[memoryview]) -> list[Reply]:
        """Store objects from slices of a ``buffer``."""

    def get(self, names: Sequence[str], targets: Sequence[memoryview]) -> list[int | Reply]:
        """Read objects into slices of a ``buffer``, each large enough; the bytes of each."""

    def exist(self, names: Sequence[str]) -> list[bool]:
        """Tell which objects are there; a later ``get`` may still miss."""

    def remove(self, names: Sequence[str]) -> int:
        """Remove objects, also while others read them; how many there were."""

    def remove_matching(self, pattern: str) -> int:
        """Remove every object whose whole name fits a regular expression; how many there were.

        Only what regular expressions of Python and ECMAScript have in common. O(objects).
        """

    def names(self) -> list[str]:
        """Return the names of all objects. O(objects)."""

    def close(self) -> None:
        """Let go of the store; the objects stay."""

"""Event counts by name: why pages were stored, found, refused or lost."""

import errno
import threading
from collections import Counter
from collections.abc import Mapping

__all__ = ["Counters", "reason_of"]

_REASONS = {
    errno.ENOSPC: "no_space",
    errno.EDQUOT: "no_space",
    errno.EPERM: "refused_by_disk",
    errno.EACCES: "refused_by_disk",
    errno.EROFS: "refused_by_disk",
}


def reason_of(error: OSError) -> str:
    """Return the counter that an error of the file system belongs to."""
    return _REASONS.get(error.errno or 0, "io_error")


class Counters:
    """Counts that only grow. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, amount: int = 1) -> None:
        """Count ``amount`` more events called ``name``."""
        with self._lock:
            self._counts[name] += amount

    def snapshot(self) -> Mapping[str, int]:
        """Return all counts so far; a name that never occurred is absent."""
        with self._lock:
            return dict(self._counts)

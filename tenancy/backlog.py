"""How many requests of each tenant wait, exactly, without a count of the queue at every arrival."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sglang_ext.types import TenantId

__all__ = ["Backlog"]


class Backlog:
    """Counts a queue by tenant. Arrivals are reported here, whatever leaves is noticed.

    The owner of the queue removes requests in many places but appends in one. So when the queue is
    as long as it should be after the arrivals, nothing has left it, and the counts still hold.
    """

    def __init__(self, tenant_of: Callable[[Any], TenantId]) -> None:
        self._tenant_of = tenant_of
        self._counts: Counter[TenantId] = Counter()
        self._length = 0

    def counts(self, queue: Sequence[Any]) -> Mapping[TenantId, int]:
        """Return the waiting requests by tenant. O(1), O(queue) after some have left."""
        if len(queue) != self._length:
            self._counts = Counter(map(self._tenant_of, queue))
            self._length = len(queue)
        return self._counts

    def append(self, req: Any) -> None:
        """Note that ``req`` is about to be appended. Call ``counts`` first. O(1)."""
        self._counts[self._tenant_of(req)] += 1
        self._length += 1

"""The requests of the last ten minutes: percentiles, hit rates over time, and the slowest."""

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_ext.metrics import FinishedRequest

__all__ = ["BIN_SECONDS", "WINDOW_SECONDS", "RecentRequests"]

WINDOW_SECONDS = 600
BIN_SECONDS = 10
_MOST = 20_000
_SLOWEST = 20


class RecentRequests:
    """Keeps the last requests, 20,000 at most. They carry numbers and a tenant, never text."""

    def __init__(self, page_size: Callable[[], int], clock: Callable[[], float] = time.time):
        self._page_size = page_size
        self._clock = clock
        self._kept: deque[tuple[float, FinishedRequest]] = deque(maxlen=_MOST)

    def finished(self, request: "FinishedRequest") -> None:
        """Take in a request that ended now. O(1)."""
        self._kept.append((self._clock(), request))

    def slowest(self) -> list[dict[str, Any]]:
        """Return the slowest requests by time to the first token, ready for JSON. O(requests)."""
        found = heapq.nlargest(_SLOWEST, self._within(), key=lambda kept: _first_token(kept[1]))
        return [_row(ended, request) for ended, request in found]

    def tenants(self) -> dict[str, dict[str, Any]]:
        """Return by tenant, ready for JSON: requests, TTFT percentiles, hit rate, and the hit rate
        of each BIN_SECONDS from the oldest to now (None: nothing could hit). O(requests log)."""
        now = self._clock()
        kept: dict[str, list[tuple[float, FinishedRequest]]] = {}
        for ended, request in self._within():
            kept.setdefault(request.tenant, []).append((ended, request))
        return {tenant: self._summary(found, now) for tenant, found in sorted(kept.items())}

    def service(self) -> dict[str, Any]:
        """Return the same as ``tenants`` for all of them together."""
        return self._summary(self._within(), self._clock())

    def _within(self) -> list[tuple[float, "FinishedRequest"]]:
        start = self._clock() - WINDOW_SECONDS
        # A copy in one step: requests end meanwhile, in another thread.
        return [(ended, request) for ended, request in list(self._kept) if ended >= start]

    def _summary(
        self, found: Sequence[tuple[float, "FinishedRequest"]], now: float
    ) -> dict[str, Any]:
        requests = [request for _, request in found]
        first = sorted(request.first_token for request in requests if request.first_token)
        return {
            "requests": len(requests),
            "ttft_p50": _percentile(first, 0.5),
            "ttft_p99": _percentile(first, 0.99),
            "hit_rate": self._hit_rate(requests),
            "hit_rates": self._hit_rates(found, now),
        }

    def _hit_rates(
        self, found: Sequence[tuple[float, "FinishedRequest"]], now: float
    ) -> list[float | None]:
        count = WINDOW_SECONDS // BIN_SECONDS
        bins: list[list[FinishedRequest]] = [[] for _ in range(count)]
        for ended, request in found:
            age = int((now - ended) // BIN_SECONDS)
            bins[count - 1 - min(max(age, 0), count - 1)].append(request)
        return [self._hit_rate(requests) for requests in bins]

    def _hit_rate(self, requests: Iterable["FinishedRequest"]) -> float | None:
        size = self._page_size()
        pairs = [(request.hits, request.eligible(size)) for request in requests]
        eligible = sum(most for _, most in pairs)
        return sum(hits for hits, _ in pairs) / eligible if eligible else None


def _first_token(request: "FinishedRequest") -> float:
    return request.seconds if request.first_token is None else request.first_token


def _percentile(ordered: Sequence[float], part: float) -> float | None:
    """Return the smallest value that ``part`` of them do not exceed."""
    return ordered[max(0, -(-int(part * 100) * len(ordered) // 100) - 1)] if ordered else None


def _row(ended: float, request: "FinishedRequest") -> dict[str, Any]:
    return {
        "ended": ended,
        "tenant": request.tenant,
        "ttft": request.first_token,
        "seconds": request.seconds,
        "prompt": request.prompt,
        "cached": dict(request.cached),
        "output": request.output,
    }

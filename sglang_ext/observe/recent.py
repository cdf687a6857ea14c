"""The requests of the last ten minutes: percentiles, hit rates over time, and the slowest."""

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from sglang_ext.metrics import FinishedRequest

__all__ = ["BIN_SECONDS", "WINDOW_SECONDS", "RecentRequests"]

WINDOW_SECONDS = 600
BIN_SECONDS = 10
_MOST = 20_000
_SLOWEST = 20
_TENANTS = 100
_BINS = WINDOW_SECONDS // BIN_SECONDS


class _Kept(NamedTuple):
    """A request that has ended, and what of its prompt came and could have come from the cache."""

    ended: float
    request: "FinishedRequest"
    hits: int
    eligible: int


class RecentRequests:
    """Keeps the last requests, 20,000 at most. They carry numbers and a tenant, never text."""

    def __init__(self, page_size: Callable[[], int], clock: Callable[[], float] = time.time):
        self._page_size = page_size
        self._clock = clock
        self._kept: deque[_Kept] = deque(maxlen=_MOST)

    def finished(self, request: "FinishedRequest") -> None:
        """Take in a request that ended now. O(1)."""
        eligible = request.eligible(self._page_size())
        self._kept.append(_Kept(self._clock(), request, request.hits, eligible))

    def slowest(self) -> list[dict[str, Any]]:
        """Return the slowest requests by time to the first token, ready for JSON. O(requests)."""
        found = heapq.nlargest(
            _SLOWEST, self._within(), key=lambda kept: _first_token(kept.request)
        )
        return [_row(kept.ended, kept.request) for kept in found]

    def tenants(self, most: int = _TENANTS) -> dict[str, dict[str, Any]]:
        """Return by tenant, ready for JSON: requests, TTFT percentiles, hit rate, and the hit rate
        of each BIN_SECONDS from the oldest to now (None: nothing could hit).

        Only of the ``most`` that sent the most requests. O(requests log requests).
        """
        kept: dict[str, list[_Kept]] = {}
        for one in self._within():
            kept.setdefault(one.request.tenant, []).append(one)
        busiest = heapq.nlargest(most, kept, key=lambda tenant: len(kept[tenant]))
        now = self._clock()
        return {tenant: _summary(kept[tenant], now) for tenant in sorted(busiest)}

    def service(self) -> dict[str, Any]:
        """Return the same as ``tenants`` for all of them together."""
        return _summary(self._within(), self._clock())

    def _within(self) -> list[_Kept]:
        start = self._clock() - WINDOW_SECONDS
        # A copy in one step: requests end meanwhile, in another thread.
        return [kept for kept in list(self._kept) if kept.ended >= start]


def _summary(found: Sequence[_Kept], now: float) -> dict[str, Any]:
    first = sorted(kept.request.first_token for kept in found if kept.request.first_token)
    return {
        "requests": len(found),
        "ttft_p50": _percentile(first, 0.5),
        "ttft_p99": _percentile(first, 0.99),
        "hit_rate": _rate(sum(kept.hits for kept in found), sum(kept.eligible for kept in found)),
        "hit_rates": _hit_rates(found, now),
    }


def _hit_rates(found: Iterable[_Kept], now: float) -> list[float | None]:
    hits, eligible = [0] * _BINS, [0] * _BINS
    for kept in found:
        age = int((now - kept.ended) // BIN_SECONDS)
        place = _BINS - 1 - min(max(age, 0), _BINS - 1)
        hits[place] += kept.hits
        eligible[place] += kept.eligible
    return list(map(_rate, hits, eligible))


def _rate(hits: int, eligible: int) -> float | None:
    return hits / eligible if eligible else None


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

"""What becomes of tenants that are no longer in the policy: their requests, sessions and pages.

Their keys are refused already, and the schedulers take no request of theirs, so that all of it only
gets less.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from sglang_ext.tenancy.changes import gone_owners, gone_tenants
from sglang_ext.tenancy.policy import Policy
from sglang_ext.types import Owner, TenantId

__all__ = ["Leavers", "Leaving", "Requests", "SeesOut"]

_POLL_SECONDS = 0.05
_SETTLE_SECONDS = 10.0
"""How long what was aborted may take to let go of its pages."""


class Requests(StrEnum):
    """What becomes of requests in flight."""

    FINISH = "finish"
    ABORT = "abort"


@dataclass(frozen=True)
class Leaving:
    """``finish``: requests may go on for ``seconds``, and are then aborted."""

    requests: Requests = Requests.FINISH
    seconds: float = 30.0


class SeesOut(Protocol):
    """Removes what belonged to who is no longer in the policy."""

    async def remove(self, old: Policy, new: Policy, leaving: Leaving) -> dict[str, Any]: ...


class Leavers:
    """Sees them out. ``ask`` runs an operation in every scheduler."""

    def __init__(
        self,
        ask: Callable[[str, dict[str, Any]], Awaitable[list[dict[str, Any]]]],
        requests_of: Callable[[TenantId], Sequence[str]],
        abort_requests: Callable[[TenantId], int],
    ) -> None:
        self._ask = ask
        self._requests_of = requests_of
        self._abort_requests = abort_requests

    async def remove(self, old: Policy, new: Policy, leaving: Leaving) -> dict[str, Any]:
        """Remove what belonged to tenants and owners of ``old`` only; say how much, by tier.

        Pages of a group that has other members are theirs, and stay. A tenant that only changed
        its group keeps what its running requests still use until they end.
        """
        tenants = gone_tenants(old, new)
        aborted = await self._end_requests(tenants, leaving)
        if tenants:
            await self._ask("close_sessions", {"tenants": tenants})
        owners: dict[str, Any] = {}
        for owner in gone_owners(old, new):
            members = [tenant for tenant in old.tenants.values() if tenant.owner == owner]
            whole = all(tenant.name not in new.tenants for tenant in members)
            owners[owner] = await self._remove_pages(owner, _SETTLE_SECONDS if whole else 0.0)
        return {"aborted_requests": aborted, "owners": owners}

    async def _end_requests(
        self, tenants: Sequence[TenantId], leaving: Leaving
    ) -> dict[TenantId, int]:
        """Return how many requests of each tenant had to be aborted."""
        if leaving.requests is Requests.FINISH:
            await self._wait(tenants, leaving.seconds)
        aborted = {name: self._abort_requests(name) for name in tenants}
        await self._wait(tenants, _SETTLE_SECONDS)
        return aborted

    async def _wait(self, tenants: Sequence[TenantId], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(map(self._requests_of, tenants)):
            await asyncio.sleep(_POLL_SECONDS)

    async def _remove_pages(self, owner: Owner, seconds: float) -> dict[str, Any]:
        """Remove until nothing is left, but not for longer than ``seconds``."""
        deadline = time.monotonic() + seconds
        freed: Counter[str] = Counter()
        while True:
            answers = await self._ask("remove_owner", {"owner": owner})
            freed.update(_sum(answer["freed"] for answer in answers))
            left = _sum(answer["left"] for answer in answers)
            if not left.total() or time.monotonic() >= deadline:
                return {"freed": dict(freed), "left": dict(left)}
            await asyncio.sleep(_POLL_SECONDS)


def _sum(rows: Any) -> Counter[str]:
    total: Counter[str] = Counter()
    for row in rows:
        total.update(row)
    return total

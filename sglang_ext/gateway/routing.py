"""Which engine serves a request: by tenant, then by session, then by prefix, then by load.

Rendezvous hashing: every engine draws a number for a tenant (and session), the highest is home.
When an engine comes or goes, only what lived there moves, so that all other prefixes stay warm.

A request without a session goes where it waits least, counted in bytes of prompt to compute before
it is at work: those of its own that the engine has not, and some for each request that is there.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from sglang_ext.gateway.plan import EngineSpec
from sglang_ext.types import TenantId

__all__ = ["Routing"]

_EQUALS = 2
"""Replicas that keep the prefixes of a tenant's requests without a session."""
_IN_FLIGHT_BYTES = 4096
"""What a request in flight counts for: a prompt of about a thousand tokens."""
_ELSEWHERE_BYTES = 8 * _IN_FLIGHT_BYTES
"""How much busier the equals have to be before a third engine has to learn a prefix."""


class Routing:
    """Answers which engines may serve whom, best first. Never changes; O(replicas)."""

    def __init__(self, specs: Iterable[EngineSpec]) -> None:
        specs = tuple(specs)
        self._own = {spec.tenant: spec.name for spec in specs if spec.tenant is not None}
        self._shared = tuple(spec.name for spec in specs if spec.tenant is None)
        self._names = tuple(spec.name for spec in specs)

    @property
    def names(self) -> Sequence[str]:
        """All engines."""
        return self._names

    @property
    def default(self) -> str:
        """The engine for what belongs to no tenant."""
        return self._names[0]

    def engines_of(self, tenant: TenantId) -> Sequence[str]:
        """Return every engine that may hold something of ``tenant``, and no other."""
        own = self._own.get(tenant)
        return self._shared if own is None else (own,)

    def order(
        self,
        tenant: TenantId,
        session: str | None,
        in_flight: Mapping[str, int],
        warm: Mapping[str, int] | None = None,
    ) -> Sequence[str]:
        """Return the engines for a request, best first.

        A session has one home. A tenant's other requests have two that are equals, and those that
        are ``warm``: how many bytes of the request's own text were sent there before.
        """
        engines = self.engines_of(tenant)
        if len(engines) < 2:
            return engines
        ranked = sorted(engines, key=lambda name: _draw(tenant, session, name), reverse=True)
        return ranked if session is not None else _least_wait(ranked, in_flight, warm or {})


def _least_wait(
    ranked: Sequence[str], in_flight: Mapping[str, int], warm: Mapping[str, int]
) -> Sequence[str]:
    """Order by what is to be computed before the request is at work; of equals, the rank counts."""
    near = {*ranked[:_EQUALS], *warm}

    def wait(name: str) -> int:
        far = 0 if name in near else _ELSEWHERE_BYTES
        return far + in_flight.get(name, 0) * _IN_FLIGHT_BYTES - warm.get(name, 0)

    return sorted(ranked, key=wait)


def _draw(tenant: str, session: str | None, engine: str) -> bytes:
    # None of the three holds a NUL.
    text = "\0".join((tenant, session or "", engine))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()

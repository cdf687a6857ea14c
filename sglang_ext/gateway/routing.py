"""Which engine serves a request: by tenant, then by session, then by load.

Rendezvous hashing: every engine draws a number for a tenant (and session), the highest is home.
When an engine comes or goes, only what lived there moves, so that all other prefixes stay warm.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from sglang_ext.gateway.plan import EngineSpec
from sglang_ext.types import TenantId

__all__ = ["Routing"]

_EQUALS = 2
"""Replicas that keep the prefixes of a tenant's requests without a session."""


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
        self, tenant: TenantId, session: str | None, in_flight: Mapping[str, int]
    ) -> Sequence[str]:
        """Return the engines for a request, best first.

        A session has one home. A tenant's other requests have two that are equals, and go to the
        one with fewer requests in flight.
        """
        engines = self.engines_of(tenant)
        if len(engines) < 2:
            return engines
        ranked = sorted(engines, key=lambda name: _draw(tenant, session, name), reverse=True)
        if session is None:
            ranked[:_EQUALS] = sorted(ranked[:_EQUALS], key=lambda name: in_flight.get(name, 0))
        return ranked


def _draw(tenant: str, session: str | None, engine: str) -> bytes:
    # None of the three holds a NUL.
    text = "\0".join((tenant, session or "", engine))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()

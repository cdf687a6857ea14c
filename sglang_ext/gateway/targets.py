"""Whose engines a request is for, from its path, its caller and what it names."""

import re
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import parse_qs

from sglang_ext.tenancy.identity import Identity
from sglang_ext.tenancy.routes import Access, access_of
from sglang_ext.types import TenantId

__all__ = ["ENGINE_HEADER", "OWN", "Target", "is_own", "target_of"]

ENGINE_HEADER = b"x-engine"
"""In which the operator may name one engine."""

OWN = frozenset(
    {
        *("/health", "/health_generate", "/ready", "/ping", "/metrics", "/metrics/"),
        *("/ext/v1/engines", "/ext/v1/policy", "/ext/v1/flush"),
        # Not answered at all: an engine takes it from the gateway alone.
        "/ext/v1/engine/policy",
    }
)
"""What the gateway answers itself, beside the tenants of the policy."""

_OWN_BELOW = ("/ext/v1/tenants/", "/ext/v1/engines/")
# What is asked of every engine of the server, or of those that may hold something of a tenant.
_OF_ALL = frozenset({"/ext/v1/tree", "/ext/v1/usage/export", "/flush_cache"})
_OF_TENANT = frozenset({"/ext/v1/usage", "/ext/v1/pins", "/ext/v1/sessions", "/abort_request"})
_SESSION = re.compile(r"/ext/v1/sessions/([^/]+)(?:/[a-z]+)?")
_NAMES_TENANT = re.compile(r"/ext/v1/(pins|sessions)(/.*)?")


class Target(NamedTuple):
    """Who a request is for.

    ``tenant``: whose engines; None: everybody's. ``every``: all of them together answer, not one.
    ``session``: a conversation, which has one home. ``engine``: the one that the operator named.
    ``changes_one``: it would change one engine of several, and nobody said which.
    """

    tenant: TenantId | None
    every: bool = False
    session: str | None = None
    engine: str | None = None
    changes_one: bool = False


def is_own(path: str) -> bool:
    """Tell whether the gateway answers by itself."""
    return path in OWN or path.startswith(_OWN_BELOW)


def target_of(
    method: str, path: str, query: bytes, headers: Mapping[bytes, bytes], caller: Identity
) -> Target:
    """Return who a request of ``caller`` is for; only the operator can name somebody else."""
    if caller.id_prefix:
        return _of_tenant(path, caller.tenant, caller)
    # Without a key this is an open route, and an answer about a name would tell that it exists.
    if ENGINE_HEADER in headers and caller.key:
        return Target(None, engine=headers[ENGINE_HEADER].decode("latin-1"))
    named = parse_qs(query.decode("latin-1")).get("tenant")
    if named and _NAMES_TENANT.fullmatch(path):
        return _of_tenant(path, TenantId(named[-1]), caller)
    if path in _OF_ALL or path in _OF_TENANT:
        return Target(None, every=True)
    changes = method not in {"GET", "HEAD", "OPTIONS"} and access_of(path) is Access.ADMIN
    return Target(None, session=caller.tag.session or None, changes_one=changes)


def _of_tenant(path: str, tenant: TenantId, caller: Identity) -> Target:
    session = _SESSION.fullmatch(path)
    name = session[1] if session else caller.tag.session
    return Target(tenant, every=path in _OF_TENANT, session=name or None)

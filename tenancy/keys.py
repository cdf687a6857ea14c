"""API keys: making them, their digests, and who a key belongs to."""

import hashlib
import hmac
import re
import secrets
import time
from dataclasses import dataclass, field

from sglang_ext.tenancy.policy import ApiKey, Policy
from sglang_ext.types import TenantId

__all__ = ["KEY_PREFIX", "KeyRing", "Principal", "digest", "fingerprint", "is_digest", "new_key"]

KEY_PREFIX = "sgx-"
"""Every key that `new_key` makes starts with it, so that a leaked key is easy to find."""

_KEY_BYTES = 32
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_FINGERPRINT = len("sha256:") + 8


def new_key() -> str:
    """A fresh key of 256 random bits, safe in a URL and in a header."""
    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def digest(key: str) -> str:
    """``sha256:<64 hex digits>`` of a key, as the policy file holds it.

    A plain hash is enough: the key has 256 random bits, so nobody can search for it.
    """
    # A header may hold bytes that are not text; such a key is unknown, never an error.
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def fingerprint(key_digest: str) -> str:
    """Return the beginning of a digest: enough to tell one key from another in a log."""
    return key_digest[:_FINGERPRINT]


def is_digest(text: str) -> bool:
    """Whether ``text`` has the form that `digest` returns."""
    return _DIGEST.fullmatch(text) is not None


@dataclass(frozen=True)
class Principal:
    """Who makes a request. An admin key belongs to no tenant."""

    tenant: TenantId | None
    is_admin: bool
    fingerprint: str = field(default="", compare=False)
    """Of the key."""


@dataclass(frozen=True, slots=True)
class _Known:
    digest: str
    principal: Principal
    until: float
    """Unix time."""


class KeyRing:
    """Answers whose key this is. Holds digests only; never changes after it is built.

    No timing leads to a key. The key is hashed first, always the whole of it. What the dictionary
    then compares is the hash: how far two hashes agree tells nothing about the key behind one of
    them, and nobody can choose a key by its hash. The last comparison, of the full hash, takes the
    same time wherever the first difference is.
    """

    def __init__(self, policy: Policy) -> None:
        self._unknown = policy.unknown_key
        self._known = {key.digest: _known(key, None) for key in policy.admin_keys}
        for name, tenant in policy.tenants.items():
            self._known.update({key.digest: _known(key, name) for key in tenant.api_keys})

    def lookup(self, key: str, now: float | None = None) -> Principal | None:
        """The owner of ``key``, or None when the request must be refused.

        A key that is not in the policy belongs to the tenant of ``unknown_key``, if there is one.
        A key of the policy whose time is over (``now``: Unix time) belongs to nobody, and so does
        the empty key (a request that carries none).
        """
        if not key:
            return None
        hashed = digest(key)
        known = self._known.get(hashed)
        if known is not None and hmac.compare_digest(known.digest, hashed):
            moment = time.time() if now is None else now
            return known.principal if moment < known.until else None
        if self._unknown is None:
            return None
        return Principal(self._unknown, False, fingerprint(hashed))


def _known(key: ApiKey, tenant: TenantId | None) -> _Known:
    principal = Principal(tenant, tenant is None, fingerprint(key.digest))
    until = float("inf") if key.until is None else key.until.timestamp()
    return _Known(key.digest, principal, until)

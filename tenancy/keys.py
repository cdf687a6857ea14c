"""API keys: making them, their digests, and who a key belongs to."""

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass

from sglang_ext.tenancy.policy import Policy
from sglang_ext.types import TenantId

__all__ = ["KEY_PREFIX", "KeyRing", "Principal", "digest", "is_digest", "new_key"]

KEY_PREFIX = "sgx-"
"""Every key that `new_key` makes starts with it, so that a leaked key is easy to find."""

_KEY_BYTES = 32
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def new_key() -> str:
    """A fresh key of 256 random bits, safe in a URL and in a header."""
    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def digest(key: str) -> str:
    """``sha256:<64 hex digits>`` of a key, as the policy file holds it.

    A plain hash is enough: the key has 256 random bits, so nobody can search for it.
    """
    # A header may hold bytes that are not text; such a key is unknown, never an error.
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def is_digest(text: str) -> bool:
    """Whether ``text`` has the form that `digest` returns."""
    return _DIGEST.fullmatch(text) is not None


@dataclass(frozen=True)
class Principal:
    """Who makes a request. An admin key belongs to no tenant."""

    tenant: TenantId | None
    is_admin: bool


class KeyRing:
    """Answers whose key this is. Holds digests only; never changes after it is built.

    No timing leads to a key. The key is hashed first, always the whole of it. What the dictionary
    then compares is the hash: how far two hashes agree tells nothing about the key behind one of
    them, and nobody can choose a key by its hash. The last comparison, of the full hash, takes the
    same time wherever the first difference is.
    """

    def __init__(self, policy: Policy) -> None:
        self._unknown = policy.unknown_key
        self._principals = {key: Principal(None, True) for key in policy.admin_keys}
        for name, tenant in policy.tenants.items():
            self._principals.update({key: Principal(name, False) for key in tenant.api_keys})
        self._digests = {key: key for key in self._principals}

    def lookup(self, key: str) -> Principal | None:
        """The owner of ``key``, or None when the request must be refused.

        A key that is not in the policy belongs to the tenant of ``unknown_key``, if there is one.
        The empty key (a request that carries none) is always refused.
        """
        if not key:
            return None
        hashed = digest(key)
        known = self._digests.get(hashed)
        if known is not None and hmac.compare_digest(known, hashed):
            return self._principals[known]
        return Principal(self._unknown, False) if self._unknown is not None else None

"""The REMOTE tier of one rank under the policy: who may hold how much, over all servers."""

from collections.abc import Mapping
from typing import Any

from sglang_ext.tenancy.policy import Policy, RemoteTier, TtlSince
from sglang_ext.tenancy.quota import QuotaBook
from sglang_ext.tiering.caps import Caps, Limit
from sglang_ext.tiering.storage_backend import ExtStorage
from sglang_ext.types import PUBLIC, SYSTEM_TENANT, Owner, OwnerLimits, Tier

__all__ = ["RemoteShare", "limits_in_bytes", "remote_config"]

_FOR_EVER_S = float("inf")


def remote_config(remote: RemoteTier) -> dict[str, Any]:
    """Return what the storage backend has to know to open the store."""
    return {
        "master": remote.master,
        "metadata": remote.metadata,
        "admin": remote.admin,
        "total_bytes": int(remote.size.amount),
    }


def limits_in_bytes(book: QuotaBook, bytes_per_token: int) -> dict[Owner, Limit]:
    """Return what a store's caps need of a quota book. O(owners)."""
    return {
        owner: Limit(
            quota_bytes=None if limits.quota is None else limits.quota * bytes_per_token,
            hard=limits.hard,
            reserve_bytes=limits.reserve * bytes_per_token,
        )
        for owner, limits in book.owners.items()
    }


class RemoteShare:
    """What owners may hold in the shared store and for how long, and what they hold.

    Bytes are those of all ranks of all servers, tokens those of one server's requests.
    """

    def __init__(self, backend: ExtStorage) -> None:
        """``backend`` has a remote store that is open."""
        assert backend.remote is not None
        self._store = backend.remote
        config = self._store.config
        ranks = config.fingerprint.tp_size * config.fingerprint.pp_size
        self.bytes_per_token = -(-config.slot_bytes // config.fingerprint.page_size) * ranks
        self.total_bytes = config.caps.total_bytes
        self._lifetimes_s: dict[Owner, float] = {}
        self._copied: frozenset[Owner] = frozenset()
        backend.copies = lambda owner: owner in self._copied
        backend.remote_lifetime_s = lambda owner: self._lifetimes_s.get(owner, 0.0)

    def book(self, policy: Policy) -> QuotaBook:
        """Return what owners may hold; raises PolicyError where the policy does not fit."""
        tokens = self.total_bytes // self.bytes_per_token
        return QuotaBook(policy, Tier.REMOTE, tokens, self.bytes_per_token)

    def use(self, policy: Policy) -> None:
        """Let the policy hold from now on.

        Pages that must be gone at a fixed time are not copied: nobody could promise it on machines
        that may be switched off. Nor are the server's own.
        """
        self._book = self.book(policy)
        tenants = {tenant.owner: tenant for tenant in policy.tenants.values()}
        self._lifetimes_s = {PUBLIC: _FOR_EVER_S} | {
            owner: tenant.ttl.nvme if tenant.ttl.remote is None else tenant.ttl.remote
            for owner, tenant in tenants.items()
        }
        self._copied = frozenset([PUBLIC]) | {
            owner
            for owner, tenant in tenants.items()
            if tenant.ttl.since is not TtlSince.CREATED and tenant.name != SYSTEM_TENANT
        }
        caps = Caps(
            total_bytes=self.total_bytes,
            limits=limits_in_bytes(self._book, self.bytes_per_token),
            # Whom this policy does not name may be another engine's: an equal share.
            default=Limit(),
        )
        self._store.set_caps(caps)

    def limits(self, owner: Owner) -> OwnerLimits:
        """Return what ``owner`` may hold, in tokens."""
        return self._book.limits(owner)

    def held_bytes(self) -> Mapping[Owner, int]:
        """Return the bytes of each of our owners, as far as this server knows. O(owners).

        Those of other engines' tenants are nothing that this one shows.
        """
        held = self._store.total_usage().owners
        return {owner: taken for owner, taken in held.items() if owner in self._copied}

    def usage(self, owner: Owner) -> int:
        """Return the bytes of one owner, as far as this server knows."""
        return self._store.usage(owner)

    def counters(self) -> dict[str, int]:
        """Return what happened since the start, by name."""
        return {f"remote_{name}": count for name, count in self._store.counters.items()}

    def delete_owner(self, owner: Owner) -> int:
        """Delete all that ``owner`` has there; return the bytes freed."""
        return self._store.delete_owner(owner)

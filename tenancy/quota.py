"""What each owner may hold in one tier, in tokens: the policy's sizes once the tier is known."""

from fractions import Fraction
from types import MappingProxyType

from sglang_ext.errors import PolicyError
from sglang_ext.tenancy.policy import Policy, Sla, TenantPolicy, TierSizes
from sglang_ext.tenancy.units import Size, SizeUnit
from sglang_ext.types import PUBLIC, SYSTEM_TENANT, Owner, OwnerLimits, Tier

__all__ = ["DEFAULT_QUOTA", "QuotaBook"]

DEFAULT_QUOTA = Size(SizeUnit.FRACTION, Fraction(1, 2))
"""Of a tier, where the policy says nothing: under contention nobody holds more than half."""

_RANKS = {Sla.BASIC: 0, Sla.STANDARD: 1, Sla.PREMIUM: 2}

# Pages of an owner that the policy no longer knows are served as before, and are the first to go.
_UNKNOWN = OwnerLimits(quota=0, rank=0)


class QuotaBook:
    """The limits of every owner in ``tier``, which holds ``capacity_tokens``.

    The system tenant and public text have neither quota nor reserve. Raises PolicyError where the
    policy does not fit the tier: reserves above the capacity or above the owner's quota, or a size
    in bytes while ``bytes_per_token`` is 0 (unknown). A sharing group counts once.
    """

    def __init__(
        self, policy: Policy, tier: Tier, capacity_tokens: int, bytes_per_token: int
    ) -> None:
        self.tier, self.capacity = tier, capacity_tokens
        self._bytes_per_token = bytes_per_token
        limits = {tenant.owner: self._resolve(tenant) for tenant in policy.tenants.values()}
        limits[PUBLIC] = OwnerLimits()
        self.owners = MappingProxyType(limits)
        self.reserved = sum(limit.reserve for limit in limits.values())
        if self.reserved > capacity_tokens:
            problem = f"reserve.{tier} of all tenants sums to {self.reserved} tokens"
            raise PolicyError("tenants", f"{problem}, expected at most {self._capacity_text()}")

    def limits(self, owner: Owner) -> OwnerLimits:
        """Return what ``owner`` may hold. O(1)."""
        return self.owners.get(owner, _UNKNOWN)

    def _resolve(self, tenant: TenantPolicy) -> OwnerLimits:
        rank, weight = _RANKS[tenant.sla], tenant.weight
        if tenant.name == SYSTEM_TENANT:
            return OwnerLimits(rank=rank, weight=weight)
        reserve = self._reserve(tenant)
        quota = self._quota(tenant, reserve)
        return OwnerLimits(quota, tenant.quota.hard, reserve, weight, rank)

    def _reserve(self, tenant: TenantPolicy) -> int:
        size = _size(tenant.reserve, self.tier)
        if size is None:
            return 0
        path = f"tenants.{tenant.name}.reserve.{self.tier}"
        tokens = self._tokens(size, path)
        if tokens > self.capacity:
            problem = f"{size} is {tokens} tokens, expected at most {self._capacity_text()}"
            raise PolicyError(path, problem)
        return tokens

    def _quota(self, tenant: TenantPolicy, reserve: int) -> int:
        size = _size(tenant.quota, self.tier)
        if size is None:
            return max(reserve, DEFAULT_QUOTA.to_tokens(self.capacity, 1))
        tokens = self._tokens(size, f"tenants.{tenant.name}.quota.{self.tier}")
        if reserve > tokens:
            problem = f"{reserve} tokens, expected at most the tenant's own quota of {tokens}"
            raise PolicyError(f"tenants.{tenant.name}.reserve.{self.tier}", problem)
        return tokens

    def _tokens(self, size: Size, path: str) -> int:
        if size.unit is SizeUnit.BYTES and not self._bytes_per_token:
            problem = f"found {size}, but this engine does not say how many bytes a token takes"
            raise PolicyError(path, f"{problem}; expected a percentage or tokens")
        return size.to_tokens(self.capacity, self._bytes_per_token)

    def _capacity_text(self) -> str:
        return f"the {self.capacity} tokens of the {self.tier} tier"


def _size(sizes: TierSizes, tier: Tier) -> Size | None:
    size: Size | None = getattr(sizes, tier.value)
    return size

"""Rules that need more than one field of the policy. Each raises PolicyError when it is broken."""

from collections.abc import Iterator
from fractions import Fraction

from sglang_ext.errors import PolicyError
from sglang_ext.namespace import is_sealed
from sglang_ext.tenancy.fields import did_you_mean, wrong
from sglang_ext.tenancy.policy import Isolation, Policy, TenantPolicy, TierSizes, TiersPolicy
from sglang_ext.tenancy.units import Size, SizeUnit
from sglang_ext.types import SYSTEM_TENANT, Owner, Tier

__all__ = ["check_policy"]

_GROUP_FIELDS = ("sla", "weight", "quota", "reserve", "ttl")
_SIZED_TIERS = (Tier.HBM, Tier.CPU, Tier.NVME, Tier.REMOTE)


def check_policy(policy: Policy) -> None:
    """Refuse a policy whose fields, each right by itself, contradict each other."""
    _check_tiers(policy.tiers)
    _check_master_key(policy)
    _check_sealed_metrics(policy)
    for tenant in policy.tenants.values():
        _check_isolation(tenant, policy)
        _check_reserve_within_quota(tenant, policy.tiers)
    _check_unknown_key(policy)
    _check_unique(_keys(policy), "key")
    _check_unique(_gpus(policy), "GPU")
    _check_unique(_prefix_names(policy), "name")
    _check_groups(policy)
    _check_reserves_fit(policy)


def _check_tiers(tiers: TiersPolicy) -> None:
    if tiers.nvme is not None and tiers.cpu is None:
        problem = "set without tiers.cpu, expected both: pages reach the disk through host memory"
        raise PolicyError("tiers.nvme", problem)
    if tiers.remote is not None and tiers.nvme is None:
        problem = "set without tiers.nvme, expected both: pages are kept on this machine too"
        raise PolicyError("tiers.remote", problem)


def _check_master_key(policy: Policy) -> None:
    nvme = policy.tiers.nvme
    asking = [tenant.name for tenant in policy.tenants.values() if tenant.encrypted]
    if asking and nvme is not None and nvme.master_key is None:
        tenant = policy.tenants[asking[0]]
        why = "encrypted" if tenant.encrypt else tenant.isolation
        expected = "expected a file of mode 0600 or env:NAME (openssl rand -hex 32)"
        problem = f"missing, tenants.{tenant.name} is {why}: {expected}"
        raise PolicyError("tiers.nvme.master_key", problem)


def _check_sealed_metrics(policy: Policy) -> None:
    sealed = [tenant.name for tenant in policy.tenants.values() if is_sealed(tenant.owner)]
    if sealed and policy.metrics.public:
        problem = f"found true, expected false: everybody would see what tenants.{sealed[0]} uses,"
        raise PolicyError("metrics.public", f"{problem} which is sealed")


def _check_isolation(tenant: TenantPolicy, policy: Policy) -> None:
    path = f"tenants.{tenant.name}"
    shared = tenant.isolation is Isolation.SHARED
    dedicated = tenant.isolation is Isolation.DEDICATED
    if shared and tenant.group is None:
        raise PolicyError(f"{path}.group", "missing, isolation shared needs the name of a group")
    if not shared and tenant.group is not None:
        raise _needs(f"{path}.group", tenant, Isolation.SHARED)
    if dedicated and not tenant.gpus:
        raise PolicyError(f"{path}.gpus", "missing, isolation dedicated needs GPUs of its own")
    if not dedicated and tenant.gpus:
        raise _needs(f"{path}.gpus", tenant, Isolation.DEDICATED)
    if not dedicated and tenant.engine != policy.engine:
        raise _needs(f"{path}.engine", tenant, Isolation.DEDICATED)


def _needs(path: str, tenant: TenantPolicy, isolation: Isolation) -> PolicyError:
    problem = f"set, but isolation is {tenant.isolation}; expected isolation {isolation} with it"
    return PolicyError(path, problem)


def _check_unknown_key(policy: Policy) -> None:
    tenant = policy.unknown_key
    if tenant is None:
        return
    declared = [name for name in policy.tenants if name != SYSTEM_TENANT]
    if tenant not in declared:
        hint = did_you_mean(tenant, declared)
        raise wrong("unknown_key", tenant, f"reject or a tenant of this file{hint}")


def _check_unique(items: Iterator[tuple[str, object]], word: str) -> None:
    """Refuse a second path with the same item. The item itself is not shown: it may be a key."""
    first_paths: dict[object, str] = {}
    for path, item in items:
        if item in first_paths:
            raise PolicyError(path, f"the same {word} as {first_paths[item]}, expected another")
        first_paths[item] = path


def _keys(policy: Policy) -> Iterator[tuple[str, object]]:
    for index, key in enumerate(policy.admin_keys):
        yield f"admin_keys[{index}]", key.digest
    for tenant in policy.tenants.values():
        for index, key in enumerate(tenant.api_keys):
            yield f"tenants.{tenant.name}.api_keys[{index}]", key.digest


def _gpus(policy: Policy) -> Iterator[tuple[str, object]]:
    for tenant in policy.tenants.values():
        for index, gpu in enumerate(tenant.gpus):
            yield f"tenants.{tenant.name}.gpus[{index}]", gpu


def _prefix_names(policy: Policy) -> Iterator[tuple[str, object]]:
    for index, prefix in enumerate(policy.public_prefixes):
        yield f"public_prefixes[{index}].name", prefix.name


def _check_reserve_within_quota(tenant: TenantPolicy, tiers: TiersPolicy) -> None:
    for tier in _SIZED_TIERS:
        reserve, quota = _size(tenant.reserve, tier), _size(tenant.quota, tier)
        if reserve is not None and quota is not None and _exceeds(reserve, quota, tiers, tier):
            path = f"tenants.{tenant.name}.reserve.{tier}"
            raise wrong(path, str(reserve), f"at most the tenant's own quota of {quota}")


def _check_groups(policy: Policy) -> None:
    """Refuse members of one group that differ in what holds for the pages they own together."""
    first_members: dict[Owner, TenantPolicy] = {}
    for tenant in policy.tenants.values():
        first = first_members.setdefault(tenant.owner, tenant)
        for field in _GROUP_FIELDS:
            if getattr(tenant, field) != getattr(first, field):
                problem = f"not the same as tenants.{first.name}.{field}"
                expected = f"expected equal ones, both share the pages of group {tenant.group}"
                raise PolicyError(f"tenants.{tenant.name}.{field}", f"{problem}, {expected}")


def _check_reserves_fit(policy: Policy) -> None:
    # A dedicated tenant has pools of its own, in which its own quota bounds its floor.
    shared = (one for one in policy.tenants.values() if one.isolation is not Isolation.DEDICATED)
    owners = {tenant.owner: tenant for tenant in shared}
    for tier in _SIZED_TIERS:
        sizes = [_size(tenant.reserve, tier) for tenant in owners.values()]
        parts = [_part(size, policy.tiers, tier) for size in sizes if size is not None]
        total = sum((part for part in parts if part is not None), Fraction(0))
        if total > 1:
            problem = f"reserve.{tier} of all tenants sums to {float(total * 100):g}%"
            raise PolicyError("tenants", f"{problem}, expected at most 100%")


def _exceeds(size: Size, other: Size, tiers: TiersPolicy, tier: Tier) -> bool:
    """Whether ``size`` is larger; False when only the running engine can tell."""
    if size.unit is other.unit:
        return size.amount > other.amount
    part, other_part = _part(size, tiers, tier), _part(other, tiers, tier)
    return part is not None and other_part is not None and part > other_part


def _part(size: Size, tiers: TiersPolicy, tier: Tier) -> Fraction | None:
    """``size`` as a part of the tier, or None when the file does not say how large the tier is."""
    if size.unit is SizeUnit.FRACTION:
        return size.amount
    sized = {Tier.CPU: tiers.cpu, Tier.NVME: tiers.nvme, Tier.REMOTE: tiers.remote}.get(tier)
    if sized is None or size.unit is SizeUnit.TOKENS:
        return None
    return size.amount / sized.size.amount


def _size(sizes: TierSizes, tier: Tier) -> Size | None:
    size: Size | None = getattr(sizes, tier.value)
    return size

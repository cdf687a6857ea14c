"""Which engines a policy asks for, and what each of them is told.

One engine serves every shared tenant, or ``--engines`` replicas of it do; each dedicated tenant has
an engine of its own. An engine reads a policy like any server: the whole one, narrowed to its
tenants and their keys, so that it could not serve another tenant if it wanted to.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_ext.errors import PolicyError, UnsupportedError
from sglang_ext.tenancy.policy import Isolation, Policy, TenantPolicy
from sglang_ext.tenancy.units import parse_size
from sglang_ext.types import SYSTEM_TENANT, TenantId

__all__ = ["SHARED", "EngineSpec", "narrowed", "needs_engines", "plan_engines"]

SHARED = "shared"
"""Name of the engine of the shared tenants; of several replicas, the beginning of their names."""

_OWN_FLAGS = frozenset(
    {
        *("--tenant-policy", "--host", "--port", "--usage-db", "--audit-log", "--engines"),
        *("--config", "--nodes", "--gateway-secret"),
    }
)


@dataclass(frozen=True)
class EngineSpec:
    """One engine to run.

    ``tenant``: whose own engine it is, None for a replica of the shared one. ``index`` of ``count``
    says which part of the machine is its own where there are no ``gpus`` to divide. ``url``: where
    an engine of another machine listens; empty for one that is started here.
    """

    name: str
    tenant: TenantId | None
    index: int
    count: int
    gpus: tuple[int, ...] = ()
    flags: tuple[str, ...] = ()
    url: str = ""


def needs_engines(policy: Policy, replicas: int) -> bool:
    """Tell whether one engine of this machine is not enough."""
    return replicas != 1 or bool(_dedicated(policy))


def plan_engines(
    policy: Policy, replicas: int, gpus: Sequence[int], nodes: Mapping[str, str] | None = None
) -> tuple[EngineSpec, ...]:
    """Return the engines, the shared ones first. ``gpus``: of this machine, empty for none.

    ``nodes``: replicas on other machines, by name where they listen. Raises SglangExtError where
    the machine or the names do not allow it.
    """
    nodes = nodes or {}
    dedicated = _dedicated(policy)
    shared = _shared_names(policy, replicas)
    _check_names(dedicated, [*shared, *nodes])
    shares = _shares(policy, dedicated, len(shared), gpus)
    count = len(shared) + len(dedicated)
    replicated = [
        EngineSpec(name, None, index, count, gpus=share)
        for index, (name, share) in enumerate(zip(shared, shares, strict=True))
    ]
    own = [
        EngineSpec(
            str(tenant.name),
            tenant.name,
            index,
            count,
            gpus=tenant.gpus if gpus else (),
            flags=_checked_flags(tenant),
        )
        for index, tenant in enumerate(dedicated, len(shared))
    ]
    away = [EngineSpec(name, None, 0, 1, url=url) for name, url in nodes.items()]
    return (*replicated, *away, *own)


def narrowed(policy: Policy, spec: EngineSpec, specs: Sequence[EngineSpec]) -> dict[str, Any]:
    """Return the policy document of one engine of ``specs``.

    Host memory and disk are divided equally; each engine but a single shared one has its folder
    inside of the policy's. Raises PolicyError for a tenant that no engine serves.
    """
    _check_served(policy, specs)
    document = dict(policy.document)
    tenants: Mapping[str, Any] = document.get("tenants", {})
    mine = _serves(policy, spec)
    document["tenants"] = {name: own for name, own in tenants.items() if name in mine}
    if document.get("unknown_key") not in mine:
        document.pop("unknown_key", None)
    if "tiers" in document:
        document["tiers"] = _tiers(document["tiers"], spec)
    if spec.tenant is not None:
        own_engine = tenants[spec.tenant].get("engine", {})
        document["engine"] = _own_engine(document.get("engine", {}), own_engine)
        # A sealed tenant shares not even public text.
        document.pop("public_prefixes", None)
    return document


def _own_engine(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Lay a tenant's settings over the shared ones; FP8 scales are for one type of page only."""
    engine = {**shared, **own}
    engine.pop("flags", None)
    if engine.get("kv_cache_dtype") != shared.get("kv_cache_dtype") and "kv_scales" not in own:
        engine.pop("kv_scales", None)
    return engine


def _dedicated(policy: Policy) -> list[TenantPolicy]:
    return [one for one in policy.tenants.values() if one.isolation is Isolation.DEDICATED]


def _serves(policy: Policy, spec: EngineSpec) -> set[str]:
    """Return the tenants of the file that ``spec`` serves."""
    if spec.tenant is not None:
        return {spec.tenant}
    own = {tenant.name for tenant in _dedicated(policy)}
    return {str(name) for name in policy.tenants} - own - {SYSTEM_TENANT}


def _check_served(policy: Policy, specs: Sequence[EngineSpec]) -> None:
    served = set().union(*(_serves(policy, spec) for spec in specs))
    for name in policy.tenants:
        if name not in served and name != SYSTEM_TENANT:
            raise PolicyError(
                f"tenants.{name}",
                "no engine for it runs: every tenant was dedicated when the server started; "
                "start it again",
            )


def _shared_names(policy: Policy, replicas: int) -> list[str]:
    own = {tenant.name for tenant in _dedicated(policy)}
    if own and not set(policy.tenants) - own - {SYSTEM_TENANT}:
        return []
    return [SHARED] if replicas == 1 else [f"{SHARED}-{number}" for number in range(replicas)]


def _check_names(dedicated: Sequence[TenantPolicy], shared: Sequence[str]) -> None:
    for tenant in dedicated:
        if tenant.name in (*shared, "gateway"):
            problem = "the name of one of the server's own parts, expected another for a dedicated"
            raise PolicyError(f"tenants.{tenant.name}", f"{problem} tenant")


def _shares(
    policy: Policy, dedicated: Sequence[TenantPolicy], replicas: int, gpus: Sequence[int]
) -> list[tuple[int, ...]]:
    """Divide the GPUs that no dedicated tenant has among the replicas, in order."""
    if not gpus:
        return [()] * replicas
    taken = {gpu: tenant for tenant in dedicated for gpu in tenant.gpus}
    for gpu, tenant in taken.items():
        if gpu not in gpus:
            known = ", ".join(map(str, gpus))
            path = f"tenants.{tenant.name}.gpus"
            raise PolicyError(path, f"found {gpu}, expected some of this machine's: {known}")
    rest = [gpu for gpu in gpus if gpu not in taken]
    size = len(rest) // replicas if replicas else 0
    if replicas and not size:
        raise UnsupportedError(
            f"{len(rest)} GPUs are left for {replicas} shared engines; lower --engines, or the "
            "gpus of dedicated tenants"
        )
    return [tuple(rest[place * size : (place + 1) * size]) for place in range(replicas)]


def _checked_flags(tenant: TenantPolicy) -> tuple[str, ...]:
    """Return the launch flags of a tenant's own engine; those that are the server's are refused."""
    for index, word in enumerate(tenant.engine.flags):
        flag = word.partition("=")[0].replace("_", "-")
        if flag in _OWN_FLAGS:
            path = f"tenants.{tenant.name}.engine.flags[{index}]"
            raise PolicyError(path, f"found {flag}, which the server sets itself; leave it out")
    return tenant.engine.flags


def _tiers(tiers: Mapping[str, Any], spec: EngineSpec) -> dict[str, Any]:
    divided = dict(tiers)
    for tier in ("cpu", "nvme"):
        if tier in tiers:
            share = int(parse_size(tiers[tier]["size"]).amount) // spec.count
            divided[tier] = {**tiers[tier], "size": f"{max(1, share)}B"}
    if "nvme" in tiers and spec.name != SHARED:
        folder = Path(tiers["nvme"]["path"]) / f"{spec.name}.engine"
        divided["nvme"] = {**divided["nvme"], "path": str(folder)}
    return divided

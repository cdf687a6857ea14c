"""One question to the planner, and the same question with one setting changed."""

import argparse
import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang_ext.errors import PlanError
from sglang_ext.plan.hardware import GPUS, Cluster, Model
from sglang_ext.plan.outcome import Outcome, play
from sglang_ext.plan.requests import (
    MOONCAKE_BLOCK_TOKENS,
    PlanRequest,
    mooncake_requests,
    rag_requests,
)
from sglang_ext.plan.sizes import sizes_of
from sglang_ext.plan.tiers import Sizes, TierStack
from sglang_ext.plan.workload import RagShape, RagTraffic, rag_turns
from sglang_ext.tenancy.loader import build_policy, load_policy
from sglang_ext.tenancy.policy import Policy
from sglang_ext.tenancy.quota import QuotaBook
from sglang_ext.types import SYSTEM_TENANT, Owner, TenantId, Tier

__all__ = ["Change", "Hardware", "Scenario", "sweep"]

_RAG_BLOCK_TOKENS = 100
_TENANTS = 6
_FACTORS = (0.25, 0.5, 2.0, 4.0)


@dataclass(frozen=True)
class Hardware:
    """A cluster and the policy that is in force on it."""

    cluster: Cluster
    policy: Policy | None

    @classmethod
    def read(cls, options: argparse.Namespace, weight_bytes: float) -> "Hardware":
        """Read the files that the options name. Raises PlanError, PolicyError and OSError."""
        try:
            config = json.loads(options.model.read_text("utf-8"))
        except ValueError as error:
            raise PlanError(f"{options.model}: no JSON: {error}") from None
        policy = load_policy(options.policy) if options.policy else None
        fp8 = policy is not None and policy.engine.kv_cache_dtype.startswith("fp8")
        cluster = Cluster(
            gpu=GPUS[options.gpu],
            gpus=options.gpus,
            model=Model.from_config(config),
            weight_bytes=weight_bytes,
            kv_number_bytes=1.0 if fp8 else 2.0,
        )
        return cls(cluster, policy)

    def room(self, tenant: str) -> dict[Tier, int]:
        """Return how many tokens a tenant's quota lets it hold in each tier that there is."""
        policy, owner = self._policy_of(tenant)
        sizes, size = sizes_of(self.cluster, policy, 1), max(1, round(self.cluster.kv_bytes))
        tokens = {Tier.HBM: sizes.hbm, Tier.CPU: sizes.cpu, Tier.NVME: sizes.nvme}
        books = [QuotaBook(policy, tier, held, size) for tier, held in tokens.items() if held]
        limits = {book.tier: book.limits(owner).quota for book in books}
        return {tier: tokens[tier] if most is None else most for tier, most in limits.items()}

    def ttls(self, tenant: str) -> dict[Tier, float]:
        """Return the TTLs of a tenant in seconds."""
        policy, _ = self._policy_of(tenant)
        ttl = policy.tenants[TenantId(tenant)].ttl
        return {Tier.HBM: ttl.hbm, Tier.CPU: ttl.cpu, Tier.NVME: ttl.nvme}

    def _policy_of(self, tenant: str) -> tuple[Policy, Owner]:
        known = None if self.policy is None else self.policy.tenants.get(TenantId(tenant))
        if self.policy is None or known is None:
            raise PlanError(f"the policy has no tenant {tenant!r}")
        return self.policy, known.owner


@dataclass(frozen=True)
class Scenario(Hardware):
    """A cluster, a policy and a row of requests, which is made anew for each simulation."""

    trace: Path | None
    rate: float
    conversations: int
    seed: int

    @classmethod
    def read(cls, options: argparse.Namespace, weight_bytes: float) -> "Scenario":
        """Read the files that the options name. Raises PlanError, PolicyError and OSError."""
        on = Hardware.read(options, weight_bytes)
        asked = options.trace, options.rate, options.conversations, options.seed
        return cls(on.cluster, on.policy, *asked)

    @property
    def tenants(self) -> list[str]:
        """Who sends requests: the tenants of the policy, or a few where there is none."""
        if self.policy is None:
            return [f"t{number}" for number in range(_TENANTS)]
        return [name for name in self.policy.tenants if name != SYSTEM_TENANT]

    @property
    def sizes(self) -> Sizes:
        """Tokens of every tier."""
        block = MOONCAKE_BLOCK_TOKENS if self.trace else _RAG_BLOCK_TOKENS
        return sizes_of(self.cluster, self.policy, block)

    def requests(self) -> Iterator[PlanRequest]:
        """Yield the requests; the tenants of the policy send them, the first ones most."""
        names = self.tenants
        if self.trace:
            found = mooncake_requests(self.trace, len(names))
        else:
            traffic = RagTraffic(conversations=self.conversations, tenants=len(names))
            # Gaps are meant in seconds: half a minute to answer, ten minutes away.
            traffic = replace(traffic, think=30 * self.rate, idle=600 * self.rate)
            found = rag_requests(rag_turns(RagShape(), traffic, self.seed), self.rate, 100)
        for request in found:
            yield request._replace(tenant=names[int(request.tenant[1:])])

    def outcome(self) -> Outcome:
        """Simulate."""
        policy = self.policy

        def weight(tenant: TenantId) -> float:
            return 1.0 if policy is None else policy.tenants[tenant].weight

        stack = TierStack(self.sizes, policy)
        return play(self.requests(), self.cluster, stack, weight=weight)


@dataclass(frozen=True)
class Change:
    """A setting that was changed, and what came of it."""

    setting: str
    value: str
    outcome: Outcome


def sweep(scenario: Scenario) -> list[Change]:
    """Change one setting at a time: the dtype of pages, tier sizes, TTLs and quotas."""
    changes = []
    for setting, value, other in _variants(scenario):
        changes.append(Change(setting, value, other.outcome()))
    return changes


def _variants(scenario: Scenario) -> Iterator[tuple[str, str, Scenario]]:
    for dtype, size in (("bf16", 2.0), ("fp8", 1.0)):
        if scenario.cluster.kv_number_bytes != size:
            cluster = replace(scenario.cluster, kv_number_bytes=size)
            yield "pages", dtype, replace(scenario, cluster=cluster)
    policy = scenario.policy
    if policy is None:
        return
    for tier in ("cpu", "nvme"):
        section = getattr(policy.tiers, tier)
        for factor in _FACTORS if section is not None else ():
            changed = _with(
                policy, ("tiers", tier, "size"), f"{int(section.size.amount * factor)}B"
            )
            yield f"tiers.{tier}.size", f"x {factor:g}", replace(scenario, policy=changed)
    for tier in ("hbm", "cpu", "nvme"):
        for ttl in ("10s", "5m", "1h", "7d"):
            changed = _with(policy, ("defaults", "ttl", tier), ttl)
            yield f"defaults.ttl.{tier}", ttl, replace(scenario, policy=changed)
        for quota in ("10%", "50%", "100%"):
            changed = _with(policy, ("defaults", "quota", tier), quota)
            yield f"defaults.quota.{tier}", quota, replace(scenario, policy=changed)


def _with(policy: Policy, path: tuple[str, ...], value: Any) -> Policy:
    """Return the policy of the same file with one field set."""
    document = copy.deepcopy(dict(policy.document))
    section = document
    for name in path[:-1]:
        section = section.setdefault(name, {})
    section[path[-1]] = value
    return build_policy(document)

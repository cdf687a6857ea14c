"""One picture of the server as plain data, for the page and the terminal: made from /metrics' own
numbers, so that the three never disagree."""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, NamedTuple, Protocol

from sglang_ext.observe.catalog import PREFIX
from sglang_ext.tenancy.policy import Policy, TenantPolicy, TierSizes
from sglang_ext.types import Tier

__all__ = ["Recent", "Sample", "overview", "samples_of"]

_MOST = 200
"""Tenants whose policy is shown."""
_TIERS = (Tier.HBM, Tier.CPU, Tier.NVME)


class Sample(NamedTuple):
    """One line of ``/metrics``; ``name`` is without PREFIX."""

    name: str
    labels: Mapping[str, str]
    value: float


class Recent(Protocol):
    """What ``observe.recent`` knows."""

    def slowest(self) -> list[dict[str, Any]]: ...

    def tenants(self) -> dict[str, dict[str, Any]]: ...

    def service(self) -> dict[str, Any]: ...


def samples_of(families: Iterable[Any]) -> list[Sample]:
    """Return our samples among prometheus_client's metric families."""
    return [
        Sample(sample.name.removeprefix(PREFIX), sample.labels, sample.value)
        for family in families
        if family.name.startswith(PREFIX)
        for sample in family.samples
    ]


def overview(samples: Iterable[Sample], recent: Recent, policy: Policy) -> dict[str, Any]:
    """Return tenants, tiers, slow requests and policy, ready for JSON. O(samples)."""
    found = _Samples(samples)
    return {
        "service": recent.service(),
        "tenants": _tenants(found, recent.tenants()),
        "tiers": _tiers(found),
        "owners": _owners(found),
        "store": {event: count for (event,), count in found.by("store_events_total", "event")},
        "slow": recent.slowest(),
        "policy": [_tenant_policy(tenant) for tenant in islice(policy.tenants.values(), _MOST)],
        "policy_total": len(policy.tenants),
    }


class _Samples:
    def __init__(self, samples: Iterable[Sample]) -> None:
        self._named: dict[str, list[Sample]] = {}
        for sample in samples:
            self._named.setdefault(sample.name, []).append(sample)

    def by(self, name: str, *labels: str) -> list[tuple[tuple[str, ...], float]]:
        """Return the sums of a metric by these labels, the others added up."""
        sums: dict[tuple[str, ...], float] = {}
        for sample in self._named.get(name, ()):
            key = tuple(sample.labels[label] for label in labels)
            sums[key] = sums.get(key, 0.0) + sample.value
        return sorted(sums.items())

    def nested(self, name: str, outer: str, inner: str) -> dict[str, dict[str, float]]:
        """Return the sums of a metric by two labels."""
        found: dict[str, dict[str, float]] = {}
        for (first, second), value in self.by(name, outer, inner):
            found.setdefault(first, {})[second] = value
        return found

    def flat(self, name: str, label: str) -> dict[str, float]:
        """Return the sums of a metric by one label."""
        return {key: value for (key,), value in self.by(name, label)}


_BY_TENANT = {
    "eligible": "eligible_tokens_total",
    "output": "generated_tokens_total",
    "recomputed": "recomputed_tokens_total",
    "requests": "requests_total",
    "queued": "queued_requests",
    "deficit": "deficit_tokens",
    "skipped": "admissions_skipped_total",
    "refused": "admissions_refused_total",
}


def _tenants(found: _Samples, recent: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one row a tenant, totals since the start beside what is recent."""
    prompt = found.nested("prompt_tokens_total", "tenant", "source")
    columns = {key: found.flat(name, "tenant") for key, name in _BY_TENANT.items()}
    names = prompt.keys() | recent.keys() | {name for rows in columns.values() for name in rows}
    return [
        {
            "name": name,
            "prompt": prompt.get(name, {}),
            **{key: rows.get(name, 0.0) for key, rows in columns.items()},
            "recent": recent.get(name),
        }
        for name in sorted(names)
    ]


def _tiers(found: _Samples) -> list[dict[str, Any]]:
    capacity = found.flat("tier_capacity_tokens", "tier")
    held = found.nested("held_tokens", "tier", "owner")
    return [
        {"name": tier.value, "capacity": capacity[tier], "held": held.get(tier, {})}
        for tier in _TIERS
        if tier in capacity
    ]


def _owners(found: _Samples) -> list[dict[str, Any]]:
    columns = {
        "held": found.nested("held_tokens", "owner", "tier"),
        "quota": found.nested("quota_tokens", "owner", "tier"),
        "reserve": found.nested("reserve_tokens", "owner", "tier"),
        "evicted": found.nested("evicted_tokens_total", "owner", "reason"),
    }
    names = {name for rows in columns.values() for name in rows}
    return [
        {"name": name, **{key: rows.get(name, {}) for key, rows in columns.items()}}
        for name in sorted(names)
    ]


def _tenant_policy(tenant: TenantPolicy) -> dict[str, Any]:
    return {
        "name": tenant.name,
        "owner": tenant.owner,
        "isolation": tenant.isolation,
        "sla": tenant.sla,
        "weight": tenant.weight,
        "quota": _sizes(tenant.quota),
        "hard": tenant.quota.hard,
        "reserve": _sizes(tenant.reserve),
        "ttl": {tier.value: getattr(tenant.ttl, tier.value) for tier in _TIERS},
        "ttl_mode": tenant.ttl.mode,
        "max_queued": tenant.max_queued,
    }


def _sizes(sizes: TierSizes) -> dict[str, str]:
    found = {tier.value: getattr(sizes, tier.value) for tier in _TIERS}
    return {name: str(size) for name, size in found.items() if size is not None}

"""The words of the project that every package shares. Imports nothing but the standard library."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

__all__ = ["PUBLIC", "SYSTEM_TENANT", "Owner", "OwnerLimits", "TenantId", "Tier"]

TenantId = NewType("TenantId", str)
"""A tenant's name as the policy file writes it."""

Owner = NewType("Owner", str)
"""Who owns a run of pages: ``t:<tenant>``, ``s:<sealed tenant>``, ``g:<sharing group>``, PUBLIC."""

PUBLIC = Owner("")
"""Owner of the runs that every tenant may share."""

SYSTEM_TENANT = TenantId("system")
"""Owner of requests that carry no tenant: warm-up and health checks."""


class Tier(StrEnum):
    """Where a copy of a page lives, from the fastest down (SGLang: device, host, storage)."""

    HBM = "hbm"
    CPU = "cpu"
    NVME = "nvme"
    REMOTE = "remote"

    # Books are kept by tier; a member's own hash is a function in Python.
    __hash__ = str.__hash__


@dataclass(frozen=True, slots=True)
class OwnerLimits:
    """What one owner may hold in one tier, in tokens.

    ``quota``: its ceiling, None for the whole tier; ``hard``: not even idle room above the quota
    may be borrowed; ``reserve``: its floor, which nobody else may take; ``weight``: its share of
    what is left; ``rank``: 0 for the class that gives first (basic), 1 standard, 2 premium.
    """

    quota: int | None = None
    hard: bool = False
    reserve: int = 0
    weight: float = 1.0
    rank: int = 1

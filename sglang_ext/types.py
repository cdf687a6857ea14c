"""The words of the project that every package shares. Imports nothing but the standard library."""

from enum import StrEnum
from typing import NewType

__all__ = ["PUBLIC", "SYSTEM_TENANT", "Owner", "TenantId", "Tier"]

TenantId = NewType("TenantId", str)
"""A tenant's name as the policy file writes it."""

Owner = NewType("Owner", str)
"""Who owns a run of pages: ``t:<tenant>``, ``g:<sharing group>``, or PUBLIC."""

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

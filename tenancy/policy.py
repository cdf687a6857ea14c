"""The policy as plain values: what the policy file says, checked, with the defaults merged in.

Nothing here reads a file; `sglang_ext.tenancy.loader` builds these from YAML.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Any

from sglang_ext.tenancy.units import Size, SizeUnit
from sglang_ext.types import Owner, TenantId

__all__ = [
    "SLA_WEIGHTS",
    "ApiKey",
    "CpuTier",
    "EnginePolicy",
    "HbmTier",
    "Isolation",
    "KvCacheDtype",
    "Loading",
    "MetricsPolicy",
    "NvmeTier",
    "Policy",
    "PublicPrefix",
    "Quota",
    "RemoteBackend",
    "RemoteTier",
    "Sla",
    "TenantPolicy",
    "TierSizes",
    "TiersPolicy",
    "Ttl",
    "TtlMode",
    "TtlSince",
]


class Sla(StrEnum):
    """Whose pages go last and whose requests go first when there is not enough for all."""

    PREMIUM = "premium"
    STANDARD = "standard"
    BASIC = "basic"


SLA_WEIGHTS = {Sla.PREMIUM: 2.0, Sla.STANDARD: 1.0, Sla.BASIC: 0.5}
"""The weight of a tenant of each class, where the policy states none."""


class Isolation(StrEnum):
    """How far a tenant is kept apart, from the least to the most."""

    SHARED = "shared"
    """Shares prefixes with the other members of its group."""
    PRIVATE = "private"
    """Its own subtree in every tier; only public prefixes are shared."""
    SEALED = "sealed"
    """Private, without public prefixes; pages zeroed when freed, lower tiers encrypted."""
    DEDICATED = "dedicated"
    """Sealed, and served by an engine process of its own on its own GPUs."""


class KvCacheDtype(StrEnum):
    """Type of the numbers in a KV page."""

    AUTO = "auto"
    BF16 = "bf16"
    FP8_E5M2 = "fp8_e5m2"
    FP8_E4M3 = "fp8_e4m3"


class TtlMode(StrEnum):
    """What happens to the upper copy of a page at its TTL."""

    LAZY = "lazy"
    """It becomes the first victim and is freed when someone needs the room."""
    STRICT = "strict"
    """It is freed at once."""


class TtlSince(StrEnum):
    """The moment from which a TTL counts."""

    LAST_USE = "last_use"
    CREATED = "created"


class RemoteBackend(StrEnum):
    """The store behind the remote tier."""

    MOONCAKE = "mooncake"


@dataclass(frozen=True, kw_only=True)
class EnginePolicy:
    """Defaults for the launch flags of an engine; a flag on the command line wins."""

    page_size: int = 16
    """Tokens a page."""
    kv_cache_dtype: KvCacheDtype = KvCacheDtype.AUTO
    kv_scales: Path | None = None
    """A safetensors file with the FP8 scales of each layer."""
    flags: tuple[str, ...] = ()
    """More words for its command line, which win over the common ones."""


@dataclass(frozen=True, kw_only=True)
class HbmTier:
    """The GPU's memory."""

    watermark: Size = Size(SizeUnit.FRACTION, Fraction(5, 100))
    """Kept free ahead of need."""


@dataclass(frozen=True, kw_only=True)
class CpuTier:
    """The host's memory."""

    size: Size


@dataclass(frozen=True, kw_only=True)
class NvmeTier:
    """A folder on a local disk. ``size`` is a hard cap."""

    size: Size
    path: Path
    master_key: str | None = None
    """Where the key lies that wraps the tenants' keys: a file of mode 0600, or env:NAME."""


@dataclass(frozen=True, kw_only=True)
class RemoteTier:
    """A store that other machines share. ``size`` is what all of them together may hold there."""

    backend: RemoteBackend
    master: str
    size: Size
    metadata: str = "P2PHANDSHAKE"
    admin: str | None = None
    """The master's HTTP port, which lists what is there; None: port 9003 of its machine."""


class Loading(StrEnum):
    """When pages that a lower tier holds come back up for a request."""

    MEASURED = "measured"
    """Where that was quicker lately than to compute them again."""
    ALWAYS = "always"


@dataclass(frozen=True, kw_only=True)
class TiersPolicy:
    """The tiers of this machine. None: the tier is not used."""

    load: Loading = Loading.MEASURED
    hbm: HbmTier = HbmTier()
    cpu: CpuTier | None = None
    nvme: NvmeTier | None = None
    remote: RemoteTier | None = None


@dataclass(frozen=True, kw_only=True)
class PublicPrefix:
    """A system prompt that every tenant may share."""

    name: str
    system: str


@dataclass(frozen=True, kw_only=True)
class MetricsPolicy:
    """What ``/metrics`` shows."""

    tenants: int = 50
    """So many tenants, the largest, have a series of their own; the rest are ``other``."""
    public: bool = False
    """Whether ``/metrics`` answers without the admin key."""


@dataclass(frozen=True, kw_only=True)
class TierSizes:
    """A size for each tier. None: not set."""

    hbm: Size | None = None
    cpu: Size | None = None
    nvme: Size | None = None
    remote: Size | None = None


@dataclass(frozen=True, kw_only=True)
class Quota(TierSizes):
    """A tenant's ceiling in each tier. None: the whole tier."""

    hard: bool = False
    """True: not even idle room above the quota may be borrowed."""


@dataclass(frozen=True, kw_only=True)
class Ttl:
    """Seconds after which a page leaves a tier."""

    hbm: float = 30.0
    cpu: float = 600.0
    nvme: float = 604800.0
    remote: float | None = None
    """None: as long as on the disk."""
    mode: TtlMode = TtlMode.LAZY
    since: TtlSince = TtlSince.LAST_USE


@dataclass(frozen=True)
class ApiKey:
    """A key that is good until ``until``, or for ever. Only its digest is known."""

    digest: str = field(repr=False)
    """``sha256:<hex>``."""
    until: datetime | None = None
    """With its time zone."""


@dataclass(frozen=True, kw_only=True)
class TenantPolicy:
    """All that holds for one tenant, with the file's defaults already merged in."""

    name: TenantId
    api_keys: tuple[ApiKey, ...] = ()
    isolation: Isolation = Isolation.PRIVATE
    group: str | None = None
    """The sharing group; set exactly when ``isolation`` is shared."""
    sla: Sla = Sla.STANDARD
    weight: float = 1.0
    """Its fair share against the weights of the others; by ``sla`` where the file states none."""
    quota: Quota = Quota()
    reserve: TierSizes = TierSizes()
    """Its floor in each tier, never taken by others."""
    ttl: Ttl = Ttl()
    max_queued: int = 256
    """Requests that may wait at once."""
    encrypt: bool = False
    """Whether its pages are encrypted on the disk; see ``encrypted``."""
    gpus: tuple[int, ...] = ()
    """The GPUs of its own engine; set exactly when ``isolation`` is dedicated."""
    engine: EnginePolicy = EnginePolicy()
    """The engine that serves it: the common one unless ``isolation`` is dedicated."""

    @property
    def owner(self) -> Owner:
        """Who owns the pages that this tenant computes: the tenant, or its sharing group.

        A sealed tenant has a name of another kind, since its pages are not those of before: it
        shares not even public text (see ``namespace.shares_public``).
        """
        if self.isolation is Isolation.SHARED:
            return Owner(f"g:{self.group}")
        sealed = self.isolation in (Isolation.SEALED, Isolation.DEDICATED)
        return Owner(f"s:{self.name}" if sealed else f"t:{self.name}")

    @property
    def encrypted(self) -> bool:
        """Whether its pages are encrypted below memory: asked for, or part of its isolation."""
        return self.encrypt or self.isolation in (Isolation.SEALED, Isolation.DEDICATED)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The whole policy file.

    Do not pickle it (``tenants`` is a read-only view): each process loads the file by itself.
    """

    tenants: Mapping[TenantId, TenantPolicy]
    """By name, read-only. Always holds the built-in tenant ``system``, which has no keys."""
    engine: EnginePolicy = EnginePolicy()
    tiers: TiersPolicy = TiersPolicy()
    admin_keys: tuple[ApiKey, ...] = ()
    """The keys that may use the admin routes."""
    public_prefixes: tuple[PublicPrefix, ...] = ()
    unknown_key: TenantId | None = None
    """The tenant of a key that is not in the file; None: such a request is refused."""
    metrics: MetricsPolicy = MetricsPolicy()
    document: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The file as plain data, as it was given: see ``tenancy.document``."""

    @property
    def encrypted_owners(self) -> frozenset[Owner]:
        """Whose pages are encrypted on the disk; one member is enough for its whole group."""
        return frozenset(tenant.owner for tenant in self.tenants.values() if tenant.encrypted)

"""Every field of the policy file with the reader of its value; `docs/policy.md` says it in prose.

Sections that are merged over others (`defaults`, a tenant, its quota) stay dicts of the fields that
are set; the others become the values of `sglang_ext.tenancy.policy`.
"""

import re
from pathlib import Path
from typing import Any

from sglang_ext.errors import PolicyError
from sglang_ext.tenancy.fields import (
    ListOf,
    MapOf,
    Reader,
    Section,
    api_keys,
    byte_size,
    choice,
    duration,
    flag,
    host_port,
    name,
    number,
    size,
    text,
    top,
    whole,
    wrong,
)
from sglang_ext.tenancy.policy import (
    CpuTier,
    HbmTier,
    Isolation,
    KvCacheDtype,
    Loading,
    MetricsPolicy,
    NvmeTier,
    PublicPrefix,
    RemoteBackend,
    RemoteTier,
    Sla,
    TiersPolicy,
    TtlMode,
    TtlSince,
)

__all__ = ["POLICY_FILE"]

_HEX_KEY = re.compile(r"\s*[0-9a-fA-F]{32,}\s*")


def _version(value: object, path: str) -> int:
    # `True == 1` in Python, so equality alone would let `version: true` pass.
    if isinstance(value, bool) or value != 1:
        raise wrong(path, value, "1")
    return 1


def _path(value: object, path: str) -> Path:
    return Path(text(value, path))


def _key_source(value: object, path: str) -> str:
    source = text(value, path)
    if _HEX_KEY.fullmatch(source):
        # Not shown: it is a secret.
        raise PolicyError(path, "found the key itself, expected a file of mode 0600 or env:NAME")
    return source


_ENGINE: Section[dict[str, Any]] = Section(
    dict,
    {
        "page_size": whole(1, 1024),
        "kv_cache_dtype": choice(KvCacheDtype),
        "kv_scales": _path,
    },
)

_OWN_ENGINE: Section[dict[str, Any]] = Section(dict, {**_ENGINE.fields, "flags": ListOf(text)})

_TIERS = Section(
    TiersPolicy,
    {
        "load": choice(Loading),
        "hbm": Section(HbmTier, {"watermark": size}),
        "cpu": Section(CpuTier, {"size": byte_size}, required=("size",)),
        "nvme": Section(
            NvmeTier,
            {"size": byte_size, "path": _path, "master_key": _key_source},
            required=("size", "path"),
        ),
        "remote": Section(
            RemoteTier,
            {
                "backend": choice(RemoteBackend),
                "master": host_port,
                "size": byte_size,
                "metadata": text,
                "admin": text,
            },
            required=("backend", "master", "size"),
        ),
    },
)

_TIER_SIZES = {"hbm": size, "cpu": size, "nvme": size, "remote": size}

_DEFAULTS: dict[str, Reader[Any]] = {
    "isolation": choice(Isolation),
    "sla": choice(Sla),
    "weight": number(0.001, 1000),
    "quota": Section(dict, {**_TIER_SIZES, "hard": flag}),
    "reserve": Section(dict, _TIER_SIZES),
    "ttl": Section(
        dict,
        {
            "hbm": duration,
            "cpu": duration,
            "nvme": duration,
            "remote": duration,
            "mode": choice(TtlMode),
            "since": choice(TtlSince),
        },
    ),
    "max_queued": whole(1, 1_000_000),
    "encrypt": flag,
}

_TENANT: dict[str, Reader[Any]] = {
    **_DEFAULTS,
    "api_keys": api_keys,
    "group": name,
    "gpus": ListOf(whole(0, 1023)),
    "engine": _OWN_ENGINE,
}

POLICY_FILE: Section[dict[str, Any]] = Section(
    dict,
    {
        "version": _version,
        "engine": _ENGINE,
        "tiers": _TIERS,
        "admin_keys": api_keys,
        "public_prefixes": ListOf(
            Section(PublicPrefix, {"name": name, "system": text}, required=("name", "system"))
        ),
        "unknown_key": text,
        "metrics": Section(MetricsPolicy, {"tenants": top, "public": flag}),
        "defaults": Section(dict, _DEFAULTS),
        "tenants": MapOf(Section(dict, _TENANT)),
    },
    required=("version",),
)

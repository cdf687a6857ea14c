"""From the policy file to a `Policy`."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sglang_ext.errors import PolicyError
from sglang_ext.tenancy.checks import check_policy
from sglang_ext.tenancy.policy import (
    SLA_WEIGHTS,
    EnginePolicy,
    Isolation,
    Policy,
    TenantPolicy,
    TierSizes,
)
from sglang_ext.tenancy.schema import POLICY_FILE
from sglang_ext.tenancy.supported import refuse_unsupported
from sglang_ext.tenancy.yaml_text import read_yaml
from sglang_ext.types import SYSTEM_TENANT, TenantId

__all__ = ["MAX_BYTES", "build_policy", "load_policy", "parse_policy", "policy_text"]

MAX_BYTES = 4 * 2**20
"""Of a policy file."""

_REJECT = "reject"


def load_policy(path: Path) -> Policy:
    """Read and check a policy file. Raises PolicyError, also when the file cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise PolicyError("", f"cannot be read: {error.strerror}") from error
    return parse_policy(policy_text(data))


def policy_text(data: bytes) -> str:
    """Return the text of a policy file. Raises PolicyError where it is too large or not UTF-8."""
    if len(data) > MAX_BYTES:
        raise PolicyError("", f"too large, expected at most {MAX_BYTES} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PolicyError("", f"not UTF-8 text (byte {error.start})") from None


def parse_policy(text: str, *, check_supported: bool = True) -> Policy:
    """Read and check a policy. Raises PolicyError at the first thing that is wrong.

    ``check_supported=False`` also accepts the fields whose feature is not built yet.
    """
    return build_policy(read_yaml(text), check_supported=check_supported)


def build_policy(document: Any, *, check_supported: bool = True) -> Policy:
    """Check a policy that was read already, as plain data; see `parse_policy`."""
    if document is None:
        raise PolicyError("", "the file is empty, expected at least: version: 1")
    if check_supported:
        refuse_unsupported(document)
    policy = replace(_policy(POLICY_FILE(document, "")), document=document)
    check_policy(policy)
    return policy


def _policy(given: Mapping[str, Any]) -> Policy:
    engine = replace(EnginePolicy(), **given.get("engine", {}))
    defaults = given.get("defaults", {})
    base = _merged(TenantPolicy(name=SYSTEM_TENANT, engine=engine), defaults)
    # The built-in tenant is in no group, has no GPUs and needs no floor, whatever the defaults say.
    system = replace(base, isolation=Isolation.PRIVATE, reserve=TierSizes())
    tenants = {SYSTEM_TENANT: system}
    for name, own in given.get("tenants", {}).items():
        tenant = _merged(replace(base, name=TenantId(name)), own)
        stated = "weight" in own or "weight" in defaults
        tenants[tenant.name] = tenant if stated else replace(tenant, weight=SLA_WEIGHTS[tenant.sla])
    unknown_key = given.get("unknown_key", _REJECT)
    as_they_are = ("tiers", "admin_keys", "public_prefixes", "metrics")
    return Policy(
        tenants=MappingProxyType(tenants),
        engine=engine,
        unknown_key=None if unknown_key == _REJECT else TenantId(unknown_key),
        **{field: given[field] for field in as_they_are if field in given},
    )


def _merged(base: TenantPolicy, own: Mapping[str, Any]) -> TenantPolicy:
    """``own`` fields over those of ``base``; sections (quota, ttl) are merged field by field."""
    fields = {
        name: replace(getattr(base, name), **value) if isinstance(value, dict) else value
        for name, value in own.items()
    }
    return replace(base, **fields)

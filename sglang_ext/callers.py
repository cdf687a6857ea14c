"""What our routes share: whose pages a caller means, and how the schedulers are asked.

A tenant means its own pages, the operator those of whom it names.
"""

from typing import Annotated, Any

from fastapi import Depends, HTTPException, Query

from sglang_ext import active
from sglang_ext.audit_log import Refusal, Refused
from sglang_ext.patches.admin_channel import ask_schedulers
from sglang_ext.tenancy.identity import SYSTEM, Identity, current_identity
from sglang_ext.types import TenantId

__all__ = ["REFUSALS", "Caller", "ask"]

REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"model": Refused, "description": "Refused, with the reason."},
    403: {"model": Refusal, "description": "Naming another tenant needs the admin key."},
    404: {"model": Refusal, "description": "The tenant has no such thing."},
}


def _caller(
    tenant: Annotated[str | None, Query(description="Whose; only for the admin key.")] = None,
) -> Identity:
    """Return who is meant; raises 403 for a tenant that names another."""
    caller = current_identity.get()
    if caller.id_prefix:
        if tenant not in (None, caller.tenant):
            raise HTTPException(403, "tenant: naming another tenant needs the admin key")
        return caller
    if tenant is None:
        return SYSTEM
    known = active.policy().tenants.get(TenantId(tenant))
    if known is None:
        raise HTTPException(400, f"tenant: {tenant!r}, expected one of the policy file")
    return Identity(known.name, known.owner)


Caller = Annotated[Identity, Depends(_caller)]


async def ask(name: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Run an operation in every scheduler; what they refuse is 400, with the reason."""
    try:
        return await ask_schedulers(name, body)
    except ValueError as error:
        raise HTTPException(400, str(error)) from error

"""Our own routes, under ``/ext/v1``. The authentication middleware keeps them for the admin key."""

from typing import Any

from fastapi import APIRouter, Depends, Query, Request

from sglang_ext.audit_log import Refused, audited
from sglang_ext.callers import ask
from sglang_ext.patches.admin_channel import tokenize

__all__ = ["router"]

router = APIRouter(
    prefix="/ext/v1",
    tags=["sglang_ext"],
    dependencies=[Depends(audited)],
    responses={400: {"model": Refused, "description": "Refused, with the reason."}},
)


@router.get("/tree")
async def tree(
    page: int = Query(0, ge=0), limit: int = Query(1000, ge=1, le=10_000)
) -> dict[str, list[dict[str, Any]]]:
    """Return a page of the cache's runs of pages, for each data-parallel rank."""
    return {"ranks": await ask("tree", {"page": page, "limit": limit})}


@router.post("/flush")
async def flush(body: dict[str, Any], request: Request) -> dict[str, list[dict[str, Any]]]:
    """Remove ``{"tenant": name}``, or ``{"all": true}``, from every tier.

    With ``"session": id`` or ``"prefix": text or token ids`` only that goes; ``cache_salt`` and
    ``extra_key`` say in which division of the tenant's space the prefix lies, as in its requests.
    Answers for each data-parallel rank what was freed, and what requests still hold.
    """
    if isinstance(body.get("prefix"), str):
        body = {**body, "prefix": await tokenize(body["prefix"])}
    ranks = await ask("flush", body)
    request.state.audit = {"of": body.get("tenant", "all"), "ranks": ranks}
    return {"ranks": ranks}

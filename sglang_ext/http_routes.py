"""Our own routes, under ``/ext/v1``: the tree is the operator's, a flush also a tenant's own."""

from typing import Any

from fastapi import APIRouter, Depends, HTTPException, Query, Request

from sglang_ext.audit_log import Refused, audited
from sglang_ext.callers import REFUSALS, ask
from sglang_ext.patches.admin_channel import tokenize
from sglang_ext.tenancy.identity import current_identity

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


@router.post("/flush", responses={403: REFUSALS[403]})
async def flush(body: dict[str, Any], request: Request) -> dict[str, list[dict[str, Any]]]:
    """Remove ``{"tenant": name}``, or ``{"all": true}``, from every tier.

    A tenant's key removes what is its own, or its sharing group's, and need not name it.
    With ``"session": id`` or ``"prefix": text or token ids`` only that goes; ``cache_salt`` and
    ``extra_key`` say in which division of the tenant's space the prefix lies, as in its requests.
    Answers for each data-parallel rank what was freed, and what requests still hold.
    """
    body = _of_caller(body)
    if isinstance(body.get("prefix"), str):
        body = {**body, "prefix": await tokenize(body["prefix"])}
    ranks = await ask("flush", body)
    request.state.audit = {"of": body.get("tenant", "all"), "ranks": ranks}
    return {"ranks": ranks}


def _of_caller(body: dict[str, Any]) -> dict[str, Any]:
    """Return a flush that reaches no further than its caller may; raises 403."""
    caller = current_identity.get()
    if not caller.id_prefix:
        return body
    if "all" in body or body.get("tenant", caller.tenant) != caller.tenant:
        raise HTTPException(403, "flushing anybody else needs the admin key")
    return {**body, "tenant": caller.tenant}

"""Our own routes, under ``/ext/v1``. The authentication middleware keeps them for the admin key."""

from typing import Any

from fastapi import APIRouter, HTTPException, Query

from sglang_ext.patches.admin_channel import ask_schedulers

__all__ = ["router"]

router = APIRouter(prefix="/ext/v1")


@router.get("/tree")
async def tree(
    page: int = Query(0, ge=0), limit: int = Query(1000, ge=1, le=10_000)
) -> dict[str, list[dict[str, Any]]]:
    """Return a page of the cache's runs of pages, for each data-parallel rank."""
    return {"ranks": await _ask("tree", {"page": page, "limit": limit})}


@router.post("/flush")
async def flush(body: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Remove ``{"tenant": name}``, or ``{"all": true}``, from every tier.

    Answers for each data-parallel rank what was freed, and what requests still hold.
    """
    return {"ranks": await _ask("flush", body)}


async def _ask(name: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    try:
        return await ask_schedulers(name, body)
    except ValueError as error:
        raise HTTPException(400, str(error)) from error

"""The page ``/ext/ui``, and the routes behind it and behind ``sglang-ext top`` and ``usage``.

The page itself holds no data and needs no key; everything it asks for does. Handlers that read
files are plain functions, which FastAPI runs in a thread.
"""

import csv
import io
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.resources import files
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Response
from fastapi.responses import JSONResponse

from sglang_ext import active
from sglang_ext.observe import recording
from sglang_ext.observe.overview import overview, samples_of
from sglang_ext.observe.usage_store import AMOUNTS

__all__ = ["router"]

router = APIRouter()

_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_OVERVIEW_SECONDS = 1.0


@router.get("/ext/ui", include_in_schema=False)
def page() -> Response:
    """Return the page for people."""
    return _file("index.html")


@router.get("/ext/ui/{name}", include_in_schema=False)
def part_of_page(name: str) -> Response:
    """Return a script or a style of the page."""
    return _file(name)


def _file(name: str) -> Response:
    held = {path.name: path for path in (files("sglang_ext.observe") / "page").iterdir()}
    if name not in held:
        raise HTTPException(404, f"{name}: not part of the page")
    kind = _TYPES[name.rpartition(".")[2]]
    return Response(held[name].read_bytes(), media_type=kind, headers=_HEADERS)


class _Kept:
    """Makes a value at most once in a while, however many ask."""

    def __init__(self, make: Callable[[], Any], seconds: float) -> None:
        self._make = make
        self._seconds = seconds
        self._lock = threading.Lock()
        self._value: Any = None
        self._due = 0.0

    def get(self) -> Any:
        with self._lock:
            if time.monotonic() >= self._due:
                self._value = self._make()
                self._due = time.monotonic() + self._seconds
            return self._value


def _overview() -> dict[str, Any]:
    from prometheus_client import CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector

    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    picture = overview(samples_of(registry.collect()), recording.recent(), active.policy())
    return {"time": time.time(), **picture}


_kept_overview = _Kept(_overview, _OVERVIEW_SECONDS)


@router.get("/ext/v1/overview")
def get_overview() -> dict[str, Any]:
    """Return what the page and ``sglang-ext top`` show: tenants, tiers, slow requests, policy."""
    picture: dict[str, Any] = _kept_overview.get()
    return picture


@router.get("/ext/v1/usage/export")
def export_usage(
    start: Annotated[datetime | None, Query(alias="from")] = None,
    end: Annotated[datetime | None, Query(alias="to")] = None,
    form: Annotated[str, Query(alias="format", pattern="^(json|csv)$")] = "json",
) -> Response:
    """Return usage by hour and tenant, of the hours that begin in ``[from, to)``.

    Times are ISO 8601, UTC where they name no zone; without them, everything. What ended up to this
    moment is in it; token-seconds may lag by some seconds.
    """
    recorder = recording.usage()
    if recorder is None:
        raise HTTPException(404, "usage is not kept; start the server with --usage-db FILE")
    if not recorder.flush():
        raise HTTPException(503, "the usage file cannot be written now; see the log")
    rows = recorder.read(_unix(start, 0.0), _unix(end, float("inf")))
    table = [{"hour": _iso(cell.hour), "tenant": cell.tenant, **sums} for cell, sums in rows]
    if form == "csv":
        return Response(_csv(table), media_type="text/csv")
    return JSONResponse({"usage": table})


def _unix(moment: datetime | None, default: float) -> float:
    if moment is None:
        return default
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _iso(hour: int) -> str:
    return datetime.fromtimestamp(hour, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _csv(table: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, ["hour", "tenant", *AMOUNTS], lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()

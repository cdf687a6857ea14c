"""The table of routes against SGLang's real application, so that a change of SGLang shows."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.parse import unquote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sglang.srt.entrypoints.http_server import app
from sglang.srt.utils.auth import AuthLevel
from sglang.srt.utils.common import add_prometheus_middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match

from sglang_ext.tenancy import auth, routes
from sglang_ext.tenancy.auth import Callers, TenantAuth
from sglang_ext.tenancy.loader import parse_policy
from sglang_ext.tenancy.routes import Access, Dialect, access_of, dialect_of

_TABLE = routes._OPEN | routes._TENANT
_RANK = {Access.OPEN: 0, Access.TENANT: 1, Access.METRICS: 2, Access.ADMIN: 3}
# Routes that SGLang does not mark as the operator's, and we do. A new one must be looked at.
_ADMIN_UNMARKED = {
    "/",
    "/docs",
    "/docs/oauth2-redirect",
    "/get_hicache_l3_cache_layout",
    "/get_server_info",
    "/openapi.json",
    "/redoc",
    "/server_info",
    "/v1/loads",
    "/vertex_generate",
}


class _Route(NamedTuple):
    """A leaf of SGLang's routing tree; ``route`` is Starlette's."""

    template: str
    route: Any

    @property
    def is_marked(self) -> bool:
        """Tell whether SGLang itself asks for an admin key here."""
        level = getattr(self.route.endpoint, "_auth_level", AuthLevel.NORMAL)
        return level is not AuthLevel.NORMAL


def _leaves(tree: list[Any]) -> Iterator[_Route]:
    for route in tree:
        included = getattr(route, "original_router", None)
        if included is not None:
            yield from _leaves(included.routes)
        elif not route.path.startswith("/ext/"):
            yield _Route(route.path, route)


_ROUTES = list(_leaves(app.routes))
_TEMPLATES = {leaf.template for leaf in _ROUTES}


def _dispatched(tree: list[_Route], path: str, method: str, root: str = "") -> str | None:
    """Return the template of the route that Starlette runs, None for 404, 405 and a redirect."""
    scope = {"type": "http", "path": path, "method": method, "root_path": root, "headers": []}
    full = (leaf for leaf in tree if leaf.route.matches(scope)[0] is Match.FULL)
    found = next(full, None)
    return None if found is None else found.template


@pytest.mark.parametrize("path", sorted(_TABLE))
def test_every_route_of_the_table_exists(path: str) -> None:
    assert path in _TEMPLATES


def test_every_other_route_needs_the_admin_key_and_was_looked_at() -> None:
    closed = [leaf for leaf in _ROUTES if access_of(leaf.template) is Access.ADMIN]
    assert {leaf.template for leaf in closed if not leaf.is_marked} == _ADMIN_UNMARKED


@pytest.mark.parametrize("leaf", [leaf for leaf in _ROUTES if leaf.is_marked], ids=str)
def test_what_sglang_keeps_for_the_operator_we_keep_too(leaf: _Route) -> None:
    # Aborting is scoped to the tenant's own requests by a hook.
    expected = Access.TENANT if leaf.template == "/abort_request" else Access.ADMIN
    assert access_of(leaf.template) is expected


def test_open_routes_change_nothing() -> None:
    for leaf in _ROUTES:
        if access_of(leaf.template) is Access.OPEN:
            assert leaf.route.methods <= {"GET", "HEAD"}


_FILLED = {
    leaf.template.replace("{model:path}", "m/x").replace("{response_id}", "r1") for leaf in _ROUTES
}
_TRICKS = (
    "/",
    "//",
    "/.",
    "/./",
    "/..",
    "/../",
    "\\",
    "%2f",
    "%2e%2e/",
    "%00",
    "%0a",
    ";",
    "é",
    "x",
)
_METHODS = st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"])


@st.composite
def _paths(draw: st.DrawFn) -> str:
    """A real path, or two glued together, with something put in somewhere."""
    path = draw(st.sampled_from(sorted(_FILLED)))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(path)))
        path = path[:at] + draw(st.sampled_from(_TRICKS)) + path[at:]
    path += draw(st.sampled_from(["", *sorted(_FILLED)]))
    return draw(st.sampled_from([path, path.upper(), path.swapcase(), path.replace("e", "%65")]))


@given(_paths(), _METHODS)
@example("//generate", "POST")
@example("/generate/", "POST")
@example("/generate/../flush_cache", "POST")
@example("/v1/models/../../flush_cache", "POST")
@example("/v1/models/../../health", "GET")
@example("/v1/responses/r1/cancel/../../../flush_cache", "POST")
@example("/flush_cache%0a", "POST")
@example("/%66lush_cache", "POST")
@example("/health/../flush_cache", "GET")
@example("/metrics/../flush_cache", "POST")
def test_no_trick_gets_less_than_the_route_asks(raw: str, method: str) -> None:
    """The server decodes a path once, and never resolves dots."""
    path = unquote(raw)
    template = _dispatched(_ROUTES, path, method)
    if template is not None:
        assert _RANK[access_of(path)] >= _RANK[access_of(template)]


@pytest.mark.parametrize("leaf", _ROUTES, ids=lambda leaf: leaf.template)
def test_a_plain_path_gets_exactly_what_its_route_asks(leaf: _Route) -> None:
    path = leaf.template.replace("{model:path}", "m/x").replace("{response_id}", "r1")
    assert access_of(path) is access_of(leaf.template)


@given(_paths(), _METHODS, st.sampled_from(["/proxy", "/generate", "/v1", "/v1/", "/proxy/"]))
@example("", "GET", "/generate")
@example("x/generate", "POST", "/proxy")
def test_no_trick_behind_a_proxy_either(raw: str, method: str, root: str) -> None:
    for path in (unquote(raw), root + unquote(raw)):
        template = _dispatched(_ROUTES, path, method, root)
        seen = auth._path({"path": path, "root_path": root})
        if template is not None:
            assert _RANK[access_of(seen)] >= _RANK[access_of(template)]


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/a_route_of_the_next_sglang",
        "/generate/",
        "/generate/x",
        "//generate",
        "/Generate",
        "generate",
        "/generate\n",
        "/healthy",
        "/health/x",
        "/v1/models/",
        "/v1/responses/",
        "/v1/responses/r1/input_items",
        "/v1/responses/r1/cancel/x",
        "/v1/messages/x",
        "/ext/v1/tree",
    ],
)
def test_what_is_not_in_the_table_needs_the_admin_key(path: str) -> None:
    assert access_of(path) is Access.ADMIN


@pytest.mark.parametrize("path", ["/metrics", "/metrics/", "/metricsx", "/metrics/../x"])
def test_all_that_leads_to_the_metrics_is_metrics(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang mounts them for every path that begins so, and for every method."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    served: Any = SimpleNamespace(routes=[])
    add_prometheus_middleware(served)
    mounted = [_Route("/metrics", route) for route in served.routes]
    for method in ("GET", "POST", "OPTIONS"):
        assert _dispatched(mounted, path, method) == "/metrics"
    assert access_of(path) is Access.METRICS
    assert _dispatched(_ROUTES, path, "GET") is None


_PREFLIGHT = [(b"origin", b"http://web"), (b"access-control-request-method", b"POST")]


def test_what_passes_as_a_preflight_reaches_no_route() -> None:
    """We ask no key of it because SGLang's CORS middleware answers it."""
    options = [entry.kwargs for entry in app.user_middleware if entry.cls is CORSMiddleware]
    assert len(options) == 1, "SGLang no longer answers preflights itself"

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("a route was reached without a key")

    guarded = TenantAuth(
        CORSMiddleware(inner, **options[0]),
        Callers(parse_policy("version: 1\ntenants: {a: {}}")),
        lambda key: False,
    )
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "OPTIONS", "path": "/metrics", "headers": _PREFLIGHT}
    asyncio.run(guarded(scope, lambda: asyncio.sleep(0, {}), send))
    assert sent[0]["status"] == 200


@pytest.mark.parametrize(
    ("path", "dialect"),
    [
        ("/v1/messages", Dialect.ANTHROPIC),
        ("/v1/messages/count_tokens", Dialect.ANTHROPIC),
        ("/v1/chat/completions", Dialect.OPENAI),
        ("/api/chat", Dialect.OLLAMA),
        ("/generate", Dialect.NATIVE),
        ("/nothing", Dialect.NATIVE),
    ],
)
def test_dialect(path: str, dialect: Dialect) -> None:
    assert dialect_of(path) is dialect

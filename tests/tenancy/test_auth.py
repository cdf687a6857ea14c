"""The middleware alone: which requests pass, as whom, and what a refused one reads."""

import asyncio
from collections.abc import Iterable
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.request_tag import RequestTag
from sglang_ext.tenancy.auth import Callers, TenantAuth
from sglang_ext.tenancy.identity import SYSTEM, Identity, current_identity
from sglang_ext.tenancy.keys import digest
from sglang_ext.tenancy.loader import parse_policy
from sglang_ext.types import Owner, TenantId

_A = Identity(TenantId("a"), Owner("t:a"))
_B = Identity(TenantId("b"), Owner("g:team"))
_POLICY = f"""
version: 1
admin_keys: ["{digest("key-admin")}"]
tenants:
  a: {{api_keys: ["{digest("key-a")}"]}}
  b: {{api_keys: ["{digest("key-b")}"], isolation: shared, group: team}}
"""
_BEARER = {"authorization": "Bearer key-a"}


class _Inner:
    """The application behind the middleware: remembers as whom it was called."""

    def __init__(self) -> None:
        self.seen: list[Identity] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        before = current_identity.get()
        await asyncio.sleep(0)
        assert current_identity.get() == before, "another request's identity came in between"
        self.seen.append(before)
        if scope["path"] == "/v1/systemone":
            raise RuntimeError("broken")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": before.tenant.encode()})


def _auth(inner: Any, extra: str = "", refused: Any = lambda status: None) -> TenantAuth:
    callers = Callers(parse_policy(_POLICY + extra))
    return TenantAuth(inner, callers, lambda key: key == "key-warm-up", refused)


async def _send(auth: Any, method: str, path: str, headers: Any) -> httpx.Response:
    transport = httpx.ASGITransport(auth)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        return await client.request(method, path, headers=headers)


def _ask(path: str, headers: Any = None, method: str = "POST", extra: str = "") -> httpx.Response:
    return asyncio.run(_send(_auth(_Inner(), extra), method, path, headers or {}))


def _identity(path: str, headers: Any = None, method: str = "POST", extra: str = "") -> Identity:
    inner = _Inner()
    answer = asyncio.run(_send(_auth(inner, extra), method, path, headers or {}))
    assert answer.status_code == 200
    assert answer.text == inner.seen[0].tenant
    return inner.seen[0]


async def _raw(auth: TenantAuth, scope: dict[str, Any]) -> list[dict[str, Any]]:
    """Call the middleware with a scope that no HTTP client would make."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    await auth({"type": "http", "method": "POST", "headers": [], **scope}, receive, send)
    return sent


def _status(headers: Iterable[tuple[bytes, bytes]], path: str = "/generate") -> int:
    sent = asyncio.run(_raw(_auth(_Inner()), {"path": path, "headers": list(headers)}))
    return int(sent[0]["status"])


@pytest.mark.parametrize(
    ("path", "where"),
    [
        ("/v1/chat/completions", ("error", "message")),
        ("/v1/messages", ("error", "message")),
        ("/generate", ("error", "message")),
        ("/api/chat", ("error",)),
        ("/no/such/route", ("error", "message")),
    ],
)
@pytest.mark.parametrize(
    ("headers", "status", "words"),
    [
        ({}, 401, "No API key"),
        ({"authorization": "Bearer key-x"}, 401, "not known"),
        ({"x-api-key": "key-x"}, 401, "not known"),
    ],
)
def test_refused(
    path: str, where: tuple[str, ...], headers: dict[str, str], status: int, words: str
) -> None:
    answer = _ask(path, headers)
    value = answer.json()
    for name in where:
        value = value[name]
    assert answer.status_code == status
    assert words in value
    assert answer.headers["www-authenticate"] == "Bearer"
    assert "key-x" not in answer.text


@pytest.mark.parametrize("path", ["/flush_cache", "/v1/loads", "/metrics", "/", "/docs", "/new"])
def test_a_tenant_is_refused_on_the_operators_routes(path: str) -> None:
    answer = _ask(path, _BEARER)
    assert answer.status_code == 403
    assert "admin key" in answer.text
    assert "www-authenticate" not in answer.headers


def test_error_types() -> None:
    openai = _ask("/v1/loads", _BEARER).json()["error"]
    assert openai["code"] == "insufficient_permissions"
    assert _ask("/v1/completions").json()["error"]["code"] == "invalid_api_key"
    anthropic = _ask("/v1/messages").json()
    assert (anthropic["type"], anthropic["error"]["type"]) == ("error", "authentication_error")
    assert _ask("/v1/messages/x", _BEARER).json()["error"]["type"] == "permission_error"


@pytest.mark.parametrize(
    "headers",
    [
        _BEARER,
        {"authorization": "bearer key-a"},
        {"AUTHORIZATION": "BEARER key-a"},
        {"authorization": "Bearer  key-a "},
        {"x-api-key": "key-a"},
        {"X-API-Key": " key-a "},
        {"authorization": "Basic abc", "x-api-key": "key-a"},
        {"authorization": "Bearer ", "x-api-key": "key-a"},
        {"x-api-key": "", "authorization": "Bearer key-a"},
    ],
    ids=str,
)
def test_where_a_key_may_stand(headers: dict[str, str]) -> None:
    assert _identity("/generate", headers) == _A


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "key-a"},
        {"authorization": "Basic key-a"},
        {"authorization": "Bearer"},
        {"authorization": "Bearer key-a key-a"},
        {"x-api-key": "Bearer key-a"},
        {"api-key": "key-a"},
        {"cookie": "authorization=Bearer key-a"},
        {"authorization": "Bearer key-x", "x-api-key": "key-a"},
        {"authorization": f"Bearer {digest('key-a')}"},
    ],
    ids=str,
)
def test_where_it_may_not(headers: dict[str, str]) -> None:
    assert _ask("/generate", headers).status_code == 401


def test_two_keys_are_never_more_than_the_first() -> None:
    headers = {"authorization": "Bearer key-a", "x-api-key": "key-admin"}
    assert _ask("/flush_cache", headers).status_code == 403
    assert _identity("/generate", headers) == _A


@given(st.binary(max_size=20), st.sampled_from([b"authorization", b"x-api-key", b"X-API-KEY"]))
def test_any_bytes_are_an_unknown_key(value: bytes, name: bytes) -> None:
    assert _status([(name, value)]) == 401
    assert _status([(name, b"Bearer " + value)]) == 401


@pytest.mark.parametrize("path", ["/health", "/health_generate", "/ready", "/ping"])
@pytest.mark.parametrize("headers", [{}, _BEARER, {"x-api-key": "key-x"}], ids=str)
def test_open_routes_belong_to_the_system(path: str, headers: dict[str, str]) -> None:
    assert _identity(path, {**headers, "cache-control": "no-store"}, "GET") == SYSTEM


def test_the_operator_is_the_system() -> None:
    for path in ("/generate", "/flush_cache", "/metrics", "/new"):
        assert _identity(path, {"authorization": "Bearer key-admin"}) == SYSTEM
        assert _identity(path, {"authorization": "Bearer key-warm-up"}) == SYSTEM


def test_owner_of_a_group() -> None:
    assert _identity("/generate", {"x-api-key": "key-b"}) == _B


def test_public_metrics() -> None:
    extra = "metrics: {public: true}"
    assert _identity("/metrics", method="GET", extra=extra) == SYSTEM
    assert _ask("/flush_cache", extra=extra).status_code == 401


def test_unknown_keys_may_be_one_tenants() -> None:
    extra = "unknown_key: a"
    assert _identity("/generate", {"x-api-key": "any"}, extra=extra) == _A
    assert _identity("/generate", {"x-api-key": "key-b"}, extra=extra) == _B
    assert _ask("/generate", extra=extra).status_code == 401
    assert _ask("/flush_cache", {"x-api-key": "any"}, extra=extra).status_code == 403


@pytest.mark.parametrize("value", ["no-store", "No-Store", "max-age=0, no-store"])
def test_no_store(value: str) -> None:
    identity = _identity("/generate", {**_BEARER, "Cache-Control": value})
    assert identity == Identity(_A.tenant, _A.owner, no_store=True)


def test_other_cache_control() -> None:
    assert _identity("/generate", {**_BEARER, "Cache-Control": "no-cache"}) == _A


_PREFLIGHT = {"origin": "http://web", "access-control-request-method": "POST"}


def test_a_preflight_needs_no_key() -> None:
    assert _identity("/generate", _PREFLIGHT, "OPTIONS") == SYSTEM


@pytest.mark.parametrize("missing", list(_PREFLIGHT))
@pytest.mark.parametrize("path", ["/metrics", "/generate"])
def test_another_options_request_needs_one(missing: str, path: str) -> None:
    """CORS lets it through to the route, and the metrics answer every method."""
    headers = {name: value for name, value in _PREFLIGHT.items() if name != missing}
    assert _ask(path, headers, "OPTIONS").status_code == 401
    assert _ask(path, {**_PREFLIGHT}, "GET").status_code == 401


@pytest.mark.parametrize(
    ("root", "path", "status"),
    [
        ("/proxy", "/proxy/generate", 200),
        ("/proxy", "/generate", 200),
        ("/proxy", "/proxy/flush_cache", 403),
        ("/proxy", "/proxy/proxy/generate", 403),
        ("/proxy", "/proxygenerate", 403),
        ("/generate", "/generate/flush_cache", 403),
    ],
)
def test_root_path(root: str, path: str, status: int) -> None:
    scope = {"path": path, "root_path": root, "headers": [(b"x-api-key", b"key-a")]}
    assert asyncio.run(_raw(_auth(_Inner()), scope))[0]["status"] == status


def test_a_refused_websocket_is_closed() -> None:
    scope = {"type": "websocket", "path": "/v1/realtime", "headers": []}
    sent = asyncio.run(_raw(_auth(_Inner()), scope))
    assert [message["type"] for message in sent] == ["websocket.close"]
    assert sent[0]["code"] == 1008


def test_the_lifespan_passes() -> None:
    inner = _Inner()
    asyncio.run(_raw(_auth(inner), {"type": "lifespan", "path": ""}))
    assert inner.seen == [SYSTEM]


def test_refusals_are_counted() -> None:
    counted: list[int] = []
    auth = _auth(_Inner(), refused=counted.append)
    for path, headers in (("/generate", {}), ("/flush_cache", _BEARER), ("/generate", _BEARER)):
        asyncio.run(_send(auth, "POST", path, headers))
    assert counted == [401, 403]


def test_the_identity_ends_with_the_request() -> None:
    async def scenario() -> None:
        auth = _auth(_Inner())
        await _raw(auth, {"path": "/generate", "headers": [(b"x-api-key", b"key-a")]})
        assert current_identity.get() == SYSTEM
        with pytest.raises(RuntimeError, match="broken"):
            await _raw(auth, {"path": "/v1/systemone", "headers": [(b"x-api-key", b"key-a")]})
        assert current_identity.get() == SYSTEM

    asyncio.run(scenario())


def test_concurrent_requests_keep_their_own() -> None:
    async def scenario() -> list[httpx.Response]:
        auth = _auth(_Inner())
        keys = ["key-a", "key-b", "key-admin"] * 10
        return await asyncio.gather(
            *(_send(auth, "POST", "/generate", {"x-api-key": key}) for key in keys)
        )

    assert [answer.text for answer in asyncio.run(scenario())] == ["a", "b", "system"] * 10


def test_wrong_keys_are_limited_by_address_and_right_ones_never() -> None:
    async def scenario() -> tuple[list[int], httpx.Response, httpx.Response]:
        auth = _auth(_Inner())
        wrong = [await _send(auth, "POST", "/generate", {"x-api-key": "no"}) for _ in range(21)]
        right = await _send(auth, "POST", "/generate", _BEARER)
        return [answer.status_code for answer in wrong], wrong[-1], right

    statuses, last, right = asyncio.run(scenario())
    assert statuses == [401] * 20 + [429]
    assert 1 <= int(last.headers["retry-after"]) <= 3
    assert right.status_code == 200


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/completions", "/api/chat", "/generate"])
def test_every_dialect_can_say_429(path: str) -> None:
    async def last() -> httpx.Response:
        auth = _auth(_Inner())
        for _ in range(20):
            await _send(auth, "POST", path, {"x-api-key": "no"})
        return await _send(auth, "POST", path, {"x-api-key": "no"})

    answer = asyncio.run(last())
    assert answer.status_code == 429
    assert "Too many wrong" in answer.text


def test_a_key_is_good_until_its_time() -> None:
    late, soon = digest("late"), digest("soon")
    keys = f"[{{key: '{late}', until: 2001-01-01T00:00:00Z}}, '{soon}']"
    extra = f"  c: {{api_keys: {keys}}}\n"
    assert _ask("/generate", {"x-api-key": "late"}, extra=extra).status_code == 401
    assert _identity("/generate", {"x-api-key": "soon"}, extra=extra).tenant == "c"


def test_another_policy_decides_from_its_moment_on() -> None:
    async def scenario() -> list[int]:
        callers = Callers(parse_policy(_POLICY))
        auth = TenantAuth(_Inner(), callers, lambda key: False)
        before = await _send(auth, "POST", "/generate", _BEARER)
        callers.use(
            parse_policy(f"version: 1\ntenants: {{z: {{api_keys: ['{digest('key-z')}']}}}}")
        )
        after = await _send(auth, "POST", "/generate", _BEARER)
        new = await _send(auth, "POST", "/generate", {"x-api-key": "key-z"})
        return [answer.status_code for answer in (before, after, new)]

    assert asyncio.run(scenario()) == [200, 401, 200]


def test_the_key_that_was_sent_can_be_told_by_its_fingerprint() -> None:
    assert _identity("/flush_cache", {"x-api-key": "key-admin"}).key == digest("key-admin")[:15]


@pytest.mark.parametrize(
    ("header", "value"), [("X-Session-Id", "a/b"), ("X-KV-TTL", "soon")], ids=lambda text: text
)
def test_a_wrong_wish_is_refused_before_anything_is_computed(header: str, value: str) -> None:
    answer = _ask("/v1/chat/completions", {**_BEARER, header: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_header"
    assert header in answer.json()["error"]["message"]
    assert _ask("/v1/messages", {**_BEARER, header: value}).json()["error"]["type"] == (
        "invalid_request_error"
    )


def test_the_wishes_of_a_request_go_with_its_identity() -> None:
    headers = {**_BEARER, "X-Session-Id": "chat", "X-KV-TTL": "30s"}
    assert _identity("/generate", headers).tag == RequestTag("chat", 30_000)

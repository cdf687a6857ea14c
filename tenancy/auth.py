"""ASGI middleware: API key -> identity. Nothing else in a request decides whose it is."""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import replace
from typing import Any, NamedTuple

from sglang_ext.tenancy.identity import SYSTEM, Identity, current_identity
from sglang_ext.tenancy.keys import KeyRing, Principal
from sglang_ext.tenancy.policy import Policy
from sglang_ext.tenancy.refusals import refusal_body
from sglang_ext.tenancy.refused import serve
from sglang_ext.tenancy.routes import Access, access_of, dialect_of

__all__ = ["TenantAuth"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_NO_KEY = "No API key: send 'Authorization: Bearer <key>' or 'x-api-key: <key>'."
_BAD_KEY = "This API key is not known to the server."
_NOT_ADMIN = "This route needs the admin key."
_POLICY_VIOLATION = 1008


class _Refusal(NamedTuple):
    status: int
    message: str


class TenantAuth:
    """Refuses requests without a valid key and marks the others with their tenant.

    Pure ASGI rather than a Starlette BaseHTTPMiddleware, which would hide a client's disconnect
    from the engine. ``is_own_key`` recognises the key of the server's own warm-up; ``on_refused``
    is called with the status of every refusal, for a counter.
    """

    def __init__(
        self,
        app: App,
        policy: Policy,
        is_own_key: Callable[[str], bool],
        on_refused: Callable[[int], None] = lambda status: None,
    ) -> None:
        self._app = app
        self._is_own_key = is_own_key
        self._keys = KeyRing(policy)
        self._identities = _identities(policy)
        self._metrics_open = policy.metrics.public
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        path = _path(scope)
        verdict = self._judge(scope, access_of(path))
        if isinstance(verdict, _Refusal):
            self._on_refused(verdict.status)
            await _refuse(scope, send, path, verdict)
            return
        token = current_identity.set(verdict)
        try:
            await serve(self._app, scope, receive, send)
        finally:
            current_identity.reset(token)

    def _judge(self, scope: Scope, access: Access) -> Identity | _Refusal:
        """Return whose the request is, or why it may not pass."""
        if self._is_open(scope, access):
            return SYSTEM
        key = _api_key(scope["headers"])
        principal = None if key is None else self._principal(key)
        if principal is None:
            return _Refusal(401, _NO_KEY if key is None else _BAD_KEY)
        if access is not Access.TENANT and not principal.is_admin:
            return _Refusal(403, _NOT_ADMIN)
        identity = SYSTEM if principal.tenant is None else self._identities[principal.tenant]
        return replace(identity, no_store=True) if _no_store(scope["headers"]) else identity

    def _principal(self, key: str) -> Principal | None:
        if self._is_own_key(key):
            return Principal(None, True)
        return self._keys.lookup(key)

    def _is_open(self, scope: Scope, access: Access) -> bool:
        if access is Access.OPEN or _is_preflight(scope):
            return True
        return access is Access.METRICS and self._metrics_open


def _identities(policy: Policy) -> Mapping[str, Identity]:
    return {name: Identity(tenant.name, tenant.owner) for name, tenant in policy.tenants.items()}


def _is_preflight(scope: Scope) -> bool:
    """Tell whether SGLang's CORS middleware will answer, before any route, as it does a browser's
    preflight, which carries no key. Another OPTIONS goes on to the route: to the metrics, say."""
    names = {name.lower() for name, _ in scope["headers"]}
    needed = {b"origin", b"access-control-request-method"}
    return scope.get("method") == "OPTIONS" and needed <= names


def _path(scope: Scope) -> str:
    """Return the path that SGLang's router will match."""
    path: str = scope["path"]
    root = scope.get("root_path", "")
    return path.removeprefix(root) if path.startswith(root + "/") else path


def _no_store(headers: list[tuple[bytes, bytes]]) -> bool:
    """Tell whether the client asked to stay out of the cache, as RFC 9111 spells it."""
    values = [value for name, value in headers if name.lower() == b"cache-control"]
    return any(b"no-store" in value.lower() for value in values)


def _api_key(headers: list[tuple[bytes, bytes]]) -> str | None:
    """Return the key of the first header that carries one, or None."""
    for name, value in headers:
        key = _key_in(name.lower(), value.decode("latin-1"))
        if key is not None:
            return key
    return None


def _key_in(name: bytes, value: str) -> str | None:
    if name == b"authorization":
        scheme, _, key = value.partition(" ")
        return key.strip() if scheme.lower() == "bearer" and key.strip() else None
    return (value.strip() or None) if name == b"x-api-key" else None


async def _refuse(scope: Scope, send: Send, path: str, refusal: _Refusal) -> None:
    if scope["type"] == "websocket":
        await send(
            {"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": refusal.message}
        )
        return
    body = refusal_body(dialect_of(path), *refusal)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

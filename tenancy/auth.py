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
from sglang_ext.tenancy.throttle import FailedKeys
from sglang_ext.tenancy.wishes import no_store, request_tag
from sglang_ext.types import TenantId

__all__ = ["Callers", "TenantAuth"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_NO_KEY = "No API key: send 'Authorization: Bearer <key>' or 'x-api-key: <key>'."
_BAD_KEY = "This API key is not known to the server, or its time is over."
_TOO_MANY = "Too many wrong API keys from this address."
_NOT_ADMIN = "This route needs the admin key."
_POLICY_VIOLATION = 1008


class _Refusal(NamedTuple):
    status: int
    message: str
    retry_after: int = 0


class _Table(NamedTuple):
    keys: KeyRing
    identities: Mapping[TenantId, Identity]
    metrics_open: bool


class Callers:
    """Whose key is whose, by the policy in force."""

    def __init__(self, policy: Policy) -> None:
        self.use(policy)

    def use(self, policy: Policy) -> None:
        """Let this policy decide from now on, all of it at one moment. O(tenants and keys)."""
        self._table = _Table(KeyRing(policy), _identities(policy), policy.metrics.public)

    def read(self) -> _Table:
        """Return what is in force; it never changes afterwards."""
        return self._table


class TenantAuth:
    """Refuses requests without a valid key and marks the others with their tenant.

    Pure ASGI rather than a Starlette BaseHTTPMiddleware, which would hide a client's disconnect
    from the engine. ``is_own_key`` recognises the key of the server's own warm-up; ``on_refused``
    is called with the status of every refusal, for a counter. Who sends wrong keys too often gets
    429 for them; a right key always passes.
    """

    def __init__(
        self,
        app: App,
        callers: Callers,
        is_own_key: Callable[[str], bool],
        on_refused: Callable[[int], None] = lambda status: None,
        failed_keys: FailedKeys | None = None,
    ) -> None:
        self._app = app
        self._is_own_key = is_own_key
        self._callers = callers
        self._on_refused = on_refused
        self._failed_keys = failed_keys or FailedKeys()

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
        table = self._callers.read()
        if _is_open(scope, access, table):
            return SYSTEM
        key = _api_key(scope["headers"])
        if key is None:
            return _Refusal(401, _NO_KEY)
        principal = self._principal(key, table.keys)
        if principal is None:
            return self._wrong_key(scope)
        if access is not Access.TENANT and not principal.is_admin:
            return _Refusal(403, _NOT_ADMIN)
        identity = SYSTEM if principal.tenant is None else table.identities[principal.tenant]
        return _with_wishes(replace(identity, key=principal.fingerprint), scope["headers"])

    def _principal(self, key: str, keys: KeyRing) -> Principal | None:
        if self._is_own_key(key):
            return Principal(None, True)
        return keys.lookup(key)

    def _wrong_key(self, scope: Scope) -> _Refusal:
        host = (scope.get("client") or ("",))[0]
        wait = self._failed_keys.failed(host)
        return _Refusal(429, _TOO_MANY, wait) if wait else _Refusal(401, _BAD_KEY)


def _is_open(scope: Scope, access: Access, table: _Table) -> bool:
    if access is Access.OPEN or _is_preflight(scope):
        return True
    return access is Access.METRICS and table.metrics_open


def _identities(policy: Policy) -> Mapping[TenantId, Identity]:
    return {name: Identity(tenant.name, tenant.owner) for name, tenant in policy.tenants.items()}


def _is_preflight(scope: Scope) -> bool:
    """Tell whether SGLang's CORS middleware will answer, before any route, as it does a browser's
    preflight, which carries no key. Another OPTIONS goes on to the route: to the metrics, say."""
    names = {name.lower() for name, _ in scope["headers"]}
    needed = {b"origin", b"access-control-request-method"}
    return scope.get("method") == "OPTIONS" and needed <= names


def _with_wishes(identity: Identity, headers: list[tuple[bytes, bytes]]) -> Identity | _Refusal:
    """Return ``identity`` with what its request asks for in headers."""
    try:
        tag = request_tag(headers)
    except ValueError as error:
        return _Refusal(400, str(error))
    return replace(identity, no_store=no_store(headers), tag=tag)


def _path(scope: Scope) -> str:
    """Return the path that SGLang's router will match."""
    path: str = scope["path"]
    root = scope.get("root_path", "")
    return path.removeprefix(root) if path.startswith(root + "/") else path


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
    body = refusal_body(dialect_of(path), refusal.status, refusal.message)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if refusal.retry_after:
        headers.append((b"retry-after", b"%d" % refusal.retry_after))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

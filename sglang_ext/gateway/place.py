"""What an engine knows of its gateway: its own name, its part of the machine, and a secret.

The gateway hands it over in one environment variable. An engine ends with its gateway, however
that ends, and takes no request that did not come through it. An engine of another machine has the
secret from a file, and lives on without its gateway.
"""

import ctypes
import hmac
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = [
    "PLACE_VARIABLE",
    "SECRET_HEADER",
    "OnlyGateway",
    "Place",
    "live_with",
    "node_place",
    "own_place",
]

PLACE_VARIABLE = "SGLANG_EXT_ENGINE"
SECRET_HEADER = b"x-sglang-ext-gateway"

_PR_SET_PDEATHSIG = 1
_REFUSED = b'{"error": {"message": "This engine answers its gateway only.", "code": 403}}'
_POLICY_VIOLATION = 1008

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True)
class Place:
    """An engine's place: ``index`` of ``count`` engines of the gateway with process id ``pid``.

    No id: the gateway is on another machine.
    """

    name: str
    index: int
    count: int
    pid: int
    secret: str = field(repr=False)

    def is_secret(self, text: str) -> bool:
        """Tell, in constant time, whether ``text`` is what only the gateway knows."""
        return hmac.compare_digest(text.encode("utf-8", "surrogatepass"), self.secret.encode())

    def variables(self) -> dict[str, str]:
        """Return what the engine finds in its environment."""
        return {PLACE_VARIABLE: json.dumps(asdict(self))}


def own_place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Return this process's place, or None for a server that no gateway started."""
    text = environment.get(PLACE_VARIABLE)
    return None if text is None else Place(**json.loads(text))


def node_place(secret: str) -> Place:
    """Return the place of the one engine of a machine, whose gateway is elsewhere."""
    return Place("node", 0, 1, 0, secret)


def live_with(pid: int) -> None:
    """Let the system send SIGTERM to this process when its parent, ``pid``, ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != pid:
        # It ended before we asked.
        sys.exit(1)


class OnlyGateway:
    """ASGI middleware, the outermost: refuses what does not carry the gateway's secret.

    ``is_own_key`` recognises the key of the engine's own warm-up.
    """

    def __init__(self, app: App, place: Place, is_own_key: Callable[[str], bool]) -> None:
        self._app = app
        self._place = place
        self._is_own_key = is_own_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] in {"http", "websocket"} and not self._may_pass(scope["headers"]):
            await _refuse(scope, send)
            return
        await self._app(scope, receive, send)

    def _may_pass(self, headers: list[tuple[bytes, bytes]]) -> bool:
        given = {name: value.decode("latin-1") for name, value in headers}
        if self._place.is_secret(given.get(SECRET_HEADER, "")):
            return True
        scheme, _, key = given.get(b"authorization", "").partition(" ")
        return scheme == "Bearer" and self._is_own_key(key)


async def _refuse(scope: Scope, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        return
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": _REFUSED})

"""A server's parts for tests of a live policy: real routes, keys and trees, and no model."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from sglang.srt.entrypoints.http_server import app as stock

from sglang_ext import active
from sglang_ext.audit_log import AuditLog
from sglang_ext.cache_backend import quota_books, residency
from sglang_ext.leavers import Leavers
from sglang_ext.live_policy import LivePolicy
from sglang_ext.operations import OPERATIONS
from sglang_ext.patches.admin_channel import admin_channel_hooks
from sglang_ext.patches.scheduling import TenantScheduling
from sglang_ext.policy_change import policy_operations
from sglang_ext.policy_file import PolicyFile
from sglang_ext.policy_routes import mount
from sglang_ext.tenancy.auth import Callers, TenantAuth
from sglang_ext.tenancy.keys import digest
from sglang_ext.types import TenantId
from tests.radix.caches import Rig, make_rig

TEXT = f"""# made by hand
version: 1
admin_keys: ["{digest("key-admin")}"]
tenants:
  a: {{api_keys: ["{digest("key-a")}"]}}
  b: {{api_keys: ["{digest("key-b")}"], isolation: shared, group: team}}
  c: {{api_keys: ["{digest("key-c")}"], isolation: shared, group: team}}
"""


class Rank:
    """One scheduler: its tree, its queue, and the operations that it takes."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        policy = active.policy()
        rig.cache.limit(quota_books(policy, rig.cache))
        rig.cache.residency = residency(policy, rig.cache)
        self.scheduling = TenantScheduling(policy, lambda: None)
        self.scheduling.cache = rig.cache
        self.sent: list[Any] = []
        self.refused: list[Any] = []
        self.closed: list[str] = []
        self.sessions: dict[str, None] = {}
        self.scheduler = SimpleNamespace(
            tree_cache=rig.cache,
            tenant_scheduling=self.scheduling,
            waiting_queue=[],
            session_controller=self,
            close_session=lambda request: self.closed.append(request.session_id),
            ipc_channels=SimpleNamespace(send_to_tokenizer=self),
            send_abort_output=lambda abort, req: self.refused.append(abort.finished_reason),
            _release_aborted_request=lambda req: None,
        )
        (self._hook,) = admin_channel_hooks({**OPERATIONS, **policy_operations()})

    def send_output(self, reply: Any, request: Any) -> None:
        self.sent.append(reply)

    def run(self, name: str, body: Mapping[str, Any]) -> Any:
        request = SimpleNamespace(method=f"sglang_ext/{name}", body=body)
        self._hook.function(lambda *_: None, self.scheduler, request)
        return self.sent.pop()


class Server:
    """The HTTP process with ``ranks`` schedulers behind it."""

    def __init__(self, folder: Path, text: str = TEXT, ranks: int = 1) -> None:
        self.path = folder / "tenants.yaml"
        self.path.write_text(text)
        self.audit = folder / "audit.jsonl"
        self.file = PolicyFile(self.path)
        policy = active.hand_over(text)
        self.file.accept(text)
        self.ranks = [Rank(make_rig()) for _ in range(ranks)]
        self.requests: dict[str, list[str]] = {}
        self.lost_lines = 0
        self.log = AuditLog(self.audit, self._lose)
        self.leavers = Leavers(self.ask, self._requests_of, self._abort)
        callers = Callers(policy)
        self.live = LivePolicy(self.file, callers, self.log, self.ask, self.leavers)
        # As SGLang answers errors: its handlers are part of what a client sees.
        self.app = FastAPI(exception_handlers=dict(stock.exception_handlers))
        mount(self.app, self.live, self.log, self.ask)
        self.guarded = TenantAuth(self.app, callers, lambda key: False)
        self.before: Callable[[str], None] = lambda name: None

    async def ask(self, name: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """As the admin channel does it: every rank, then the first refusal, if any."""
        self.before(name)
        await asyncio.sleep(0)
        replies = [rank.run(name, body) for rank in self.ranks]
        for reply in replies:
            if not reply.success:
                raise ValueError(reply.error)
        return [reply.response[0] for reply in replies]

    def call(
        self, method: str, path: str, key: str = "key-admin", **request: Any
    ) -> httpx.Response:
        """Send one request with ``key``."""
        return asyncio.run(self.send(method, path, key, **request))

    async def send(
        self, method: str, path: str, key: str = "key-admin", **request: Any
    ) -> httpx.Response:
        transport = httpx.ASGITransport(self.guarded)
        headers = {"authorization": f"Bearer {key}", **request.pop("headers", {})}
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.request(method, path, headers=headers, **request)

    def _requests_of(self, tenant: TenantId) -> Sequence[str]:
        return self.requests.get(tenant, [])

    def _abort(self, tenant: TenantId) -> int:
        return len(self.requests.pop(tenant, []))

    def _lose(self) -> None:
        self.lost_lines += 1


def forget_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing of this test's policy be in force after it."""
    for name in (active.POLICY_VARIABLE, active.DIGEST_VARIABLE):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(active, "_in_force", [])

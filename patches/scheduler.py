"""Hooks on the scheduler: no request enters the queue without a namespace.

SGLang has no cache key in embedding requests, so that they would all meet in one namespace. Their
id carries the tenant (``tenancy.identity``), and this is where it takes effect; so do a client's
wish to leave nothing in the cache, and its session and shorter lifetime (``request_tag``).
"""

from collections.abc import Callable
from typing import Any

from sglang_ext.namespace import SYSTEM_OWNER, frame, is_framed, parse
from sglang_ext.patches.admission import admission_hooks
from sglang_ext.patches.hooks import Hook
from sglang_ext.patches.retraction import retraction_hooks
from sglang_ext.patches.schedule_policy import policy_hooks
from sglang_ext.patches.scheduling import SchedulerObserver, TenantScheduling, scheduling_hooks
from sglang_ext.request_tag import detach
from sglang_ext.tenancy.identity import tenant_of_id
from sglang_ext.tenancy.policy import Policy
from sglang_ext.types import SYSTEM_TENANT, Owner, TenantId

__all__ = ["namespace_hooks", "scheduler_hooks"]

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_QUEUE = ("self", "req", "is_retracted")
_CREATE = ("self", "recv_req", "args", "kwargs")


def namespace_hooks(policy: Callable[[], Policy]) -> list[Hook]:
    """Return the hook that gives a request without a cache key its tenant's namespace.

    ``policy`` returns the one in force.
    """

    owners = _Owners(policy)

    def add_request_to_queue(
        original: Callable[..., None], scheduler: Any, req: Any, is_retracted: bool = False
    ) -> None:
        if not is_framed(req.extra_key):
            req.extra_key = frame(owners.of(tenant_of_id(req.rid))) + (req.lora_id or "")
        elif parse(req.extra_key).once:
            req.skip_radix_cache_insert = True
        original(scheduler, req, is_retracted)

    return [
        Hook(f"{_SCHEDULER}._add_request_to_queue", add_request_to_queue, _QUEUE),
        Hook(f"{_SCHEDULER}._create_generation_req", _create_generation_req, _CREATE),
    ]


def _create_generation_req(
    original: Callable[..., Any], scheduler: Any, recv_req: Any, *args: Any, **kwargs: Any
) -> Any:
    """Take the tag off the cache key before anybody reads the key, and keep it with the request."""
    req = original(scheduler, recv_req, *args, **kwargs)
    req.kv_tag, req.extra_key = detach(req.extra_key)
    return req


def scheduler_hooks(policy: Policy, observer: Callable[[], SchedulerObserver]) -> list[Hook]:
    """Return the hooks that share one scheduler's time and memory between its tenants."""
    scheduling = TenantScheduling(policy, observer)
    return [
        *scheduling_hooks(scheduling),
        *policy_hooks(scheduling),
        *admission_hooks(scheduling),
        *retraction_hooks(scheduling),
    ]


class _Owners:
    """Who owns what a tenant computes, also after the tenant left the policy.

    Its last requests may still be on their way then. They belong to who it was; one that never
    came before it left is taken for sealed, which shares with nobody and leaves nothing behind.
    """

    def __init__(self, policy: Callable[[], Policy]) -> None:
        self._policy = policy
        self._known: dict[str, Owner] = {}

    def of(self, name: str) -> Owner:
        if not name or name == SYSTEM_TENANT:
            return SYSTEM_OWNER
        tenant = self._policy().tenants.get(TenantId(name))
        if tenant is not None:
            self._known[name] = tenant.owner
        return self._known.get(name) or Owner(f"s:{name}")

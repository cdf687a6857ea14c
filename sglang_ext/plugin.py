"""SGLang's plugin entry point, run first in every process of the server."""

import gc
from functools import partial
from typing import TYPE_CHECKING

from sglang_ext import active

if TYPE_CHECKING:
    from sglang_ext.scheduler_metrics import SchedulerMetrics

__all__ = ["register"]


def register() -> None:
    """Install hooks and cache backend where a tenant policy is in force; else change nothing.

    An exception here is logged and swallowed by SGLang. The launcher and the cache factory
    therefore check again that every hook applied (``patches.hooks.verify``). Python's garbage
    collection is on afterwards; the launcher leaves it off while modules are imported.
    """
    try:
        if active.has_policy():
            _register()
    finally:
        gc.enable()


def _register() -> None:
    from sglang_ext.cache_backend import register_backend
    from sglang_ext.metrics import by_tier
    from sglang_ext.operations import OPERATIONS
    from sglang_ext.patches import hooks
    from sglang_ext.patches.admin_channel import admin_channel_hooks
    from sglang_ext.patches.flashinfer_pages import register_flashinfer_pages
    from sglang_ext.patches.prefill_rate import prefill_rate_hooks
    from sglang_ext.patches.rank_routing import rank_hooks
    from sglang_ext.patches.refusal_status import refusal_status_hooks
    from sglang_ext.patches.schedule_policy import offer_tenant_fair
    from sglang_ext.patches.scheduler import namespace_hooks, scheduler_hooks
    from sglang_ext.patches.sealed_pages import sealed_pages_hooks
    from sglang_ext.patches.shutdown import shutdown_hooks
    from sglang_ext.patches.tokenizer_manager import identity_hooks
    from sglang_ext.patches.trace_attributes import trace_hooks
    from sglang_ext.patches.versions import check_version
    from sglang_ext.patches.weight_updates import weight_update_hooks
    from sglang_ext.policy_change import policy_operations
    from sglang_ext.public_prefixes import public_prefixes
    from sglang_ext.rank_router import RankRouter

    check_version()
    offer_tenant_fair()
    register_flashinfer_pages()
    hooks.install(
        [
            *identity_hooks(active.request_metrics()),
            *namespace_hooks(active.policy),
            *admin_channel_hooks({**OPERATIONS, **policy_operations()}),
            *refusal_status_hooks(),
            *scheduler_hooks(active.policy(), _scheduler_metrics),
            *sealed_pages_hooks(),
            *shutdown_hooks(),
            *trace_hooks(by_tier),
            *weight_update_hooks(),
            *prefill_rate_hooks(),
            *rank_hooks(RankRouter),
        ]
    )
    register_backend(partial(public_prefixes, active.policy()), check=hooks.verify)


def _scheduler_metrics() -> "SchedulerMetrics":
    from sglang_ext.observe import recording
    from sglang_ext.scheduler_metrics import SchedulerMetrics

    policy = active.policy()
    usage = recording.held_usage()
    return SchedulerMetrics(policy.metrics.tenants, list(policy.tenants), usage)

"""The requests of a tenant that the HTTP process waits for, and how they are ended."""

from typing import Any

from sglang_ext.types import TenantId

__all__ = ["abort_requests", "requests_of"]


def requests_of(tenant: TenantId) -> list[str]:
    """Return the engine's ids of all that ``tenant`` has in flight. O(requests of everybody)."""
    return [rid for rid in _manager().rid_to_state if rid.startswith(f"{tenant}/")]


def abort_requests(tenant: TenantId) -> int:
    """Ask the engine to end them, for the operator; return how many there were."""
    found = requests_of(tenant)
    for rid in found:
        _manager().abort_request(rid=rid)
    return len(found)


def _manager() -> Any:
    from sglang.srt.entrypoints.http_server import get_global_state

    return get_global_state().tokenizer_manager

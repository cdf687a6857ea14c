"""Hooks on SGLang's TokenizerManager, through which every route passes.

They put the identity of the request (set by the authentication middleware) into everything that
the engine uses to tell requests apart, and take it out of what goes back to the client.
"""

import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from contextvars import Context
from typing import Any, NamedTuple, Protocol

from sglang_ext.namespace import parse
from sglang_ext.patches.hooks import Hook
from sglang_ext.request_tag import detach
from sglang_ext.tenancy.identity import (
    Identity,
    apply_identity,
    current_identity,
    tenant_of_id,
    unscope_output,
)
from sglang_ext.types import TenantId

__all__ = ["RequestFacts", "RequestObserver", "identity_hooks"]

_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_IO = "sglang.srt.managers.io_struct"


class RequestFacts(NamedTuple):
    """What SGLang's collector of metrics is not told about a request.

    ``may_hit``: it may read the cache. ``first_token``: seconds from arrival, None before it.
    """

    may_hit: bool = True
    first_token: float | None = None


class RequestObserver(Protocol):
    """Counts requests; see ``sglang_ext.metrics``."""

    def request(self, tenant: TenantId) -> AbstractContextManager[Callable[[Any], None]]:
        """Open one request of ``tenant``; the value is called with each output."""


def identity_hooks(observer: RequestObserver) -> list[Hook]:
    """Return the hooks that give every request its tenant."""

    async def generate_request(
        original: Callable[..., AsyncGenerator[Any, None]],
        manager: Any,
        obj: Any,
        request: Any = None,
    ) -> AsyncGenerator[Any, None]:
        identity = current_identity.get()
        # The loop that handles every tenant's outputs must not inherit this tenant's context.
        Context().run(manager.auto_create_handle_loop)
        async with AsyncExitStack() as stack:
            observe = stack.enter_context(observer.request(identity.tenant))
            _check_ids(obj, manager)
            apply_identity(obj, identity)
            outputs = _closed_as(identity, original(manager, obj, request))
            async for output in await stack.enter_async_context(outputs):
                observe(output)
                unscope_output(output, identity)
                yield output

    return [
        Hook(f"{_MANAGER}.generate_request", generate_request, ("self", "obj", "request")),
        Hook(f"{_MANAGER}.collect_metrics", _collect_metrics, ("self", "state", "recv_obj", "i")),
        Hook(f"{_MANAGER}.abort_request", _abort_request, ("self", "rid", "abort_all")),
        Hook(f"{_MANAGER}.open_session", _open_session, ("self", "obj", "request")),
        Hook(f"{_MANAGER}.close_session", _close_session, ("self", "obj", "request")),
        Hook(f"{_IO}.GenerateReqInput.regenerate_rid", _regenerate_rid, ("self",)),
    ]


def _check_ids(obj: Any, manager: Any) -> None:
    """Raise ValueError for a token id that the model has not: SGLang looks it up as it is, and the
    error ends the engine, for everybody."""
    ids = getattr(obj, "input_ids", None)
    if not ids:
        return
    size = int(manager.model_config.vocab_size)
    rows = [ids] if isinstance(ids[0], int) else ids
    wrong = next(
        (id for row in rows if row for id in (min(row), max(row)) if not 0 <= id < size), None
    )
    if wrong is not None:
        raise ValueError(f"input_ids: found {wrong}, expected token ids from 0 to {size - 1}")


@asynccontextmanager
async def _closed_as(
    identity: Identity, outputs: AsyncGenerator[Any, None]
) -> AsyncIterator[AsyncGenerator[Any, None]]:
    """Close ``outputs`` as the tenant whose they are, so that SGLang can abort the request: an
    abandoned generator is closed in the context of whoever frees it."""
    try:
        yield outputs
    finally:
        token = current_identity.set(identity)
        try:
            await outputs.aclose()
        finally:
            current_identity.reset(token)


def _collect_metrics(
    original: Callable[..., None], manager: Any, state: Any, recv_obj: Any, i: int
) -> None:
    """Label the request with its tenant, whatever labels the client sent."""
    state.obj.custom_labels = {"tenant": tenant_of_id(recv_obj.rids[i])}
    if state.finished:
        state.obj.custom_labels["facts"] = _facts(state)
    original(manager, state, recv_obj, i)


def _facts(state: Any) -> RequestFacts:
    stats = state.time_stats
    _, extra_key = detach(getattr(state.obj, "extra_key", None))
    once = parse(extra_key).once
    seconds = stats.get_first_token_latency() if stats.first_token_time > 0 else None
    return RequestFacts(not once, seconds)


def _abort_request(
    original: Callable[..., None], manager: Any, rid: str = "", abort_all: bool = False
) -> None:
    """Abort only what the caller owns; the engine calls this with ids that are scoped already.

    The engine aborts by prefix, so an empty id of a client must not become the tenant's prefix.
    """
    identity = current_identity.get()
    if abort_all and identity.id_prefix:
        raise ValueError("abort_all needs the admin key")
    if rid and not rid.startswith(identity.id_prefix):
        rid = identity.scope(rid)
    original(manager, rid=rid, abort_all=abort_all)


async def _open_session(
    original: Callable[..., Awaitable[str | None]], manager: Any, obj: Any, request: Any = None
) -> str | None:
    identity = current_identity.get()
    obj.session_id = identity.scope(obj.session_id or uuid.uuid4().hex)
    session_id = await original(manager, obj, request)
    return None if session_id is None else identity.unscope(session_id)


async def _close_session(
    original: Callable[..., Awaitable[None]], manager: Any, obj: Any, request: Any = None
) -> None:
    obj.session_id = current_identity.get().scope(obj.session_id)
    await original(manager, obj, request)


def _regenerate_rid(original: Callable[..., Any], obj: Any) -> Any:
    """Keep the tenant's prefix on the fresh ids that SGLang gives to parallel samples."""
    identity = current_identity.get()
    fresh = original(obj)
    many = isinstance(fresh, list)
    obj.rid = [identity.scope(rid) for rid in fresh] if many else identity.scope(fresh)
    return obj.rid

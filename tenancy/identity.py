"""Who a request is: set by the server from the API key, never by the client.

Request ids and session ids of a tenant are prefixed with ``<tenant>/`` inside the engine, so that
one tenant cannot name another's, and so that the scheduler can tell the tenant from the id alone.
``/`` never stands in a tenant's name. The system tenant's ids stay as SGLang made them, since the
engine recognises its own health checks by their id.
"""

import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from sglang_ext.namespace import SYSTEM_OWNER, frame
from sglang_ext.request_tag import NO_TAG, RequestTag, attach
from sglang_ext.types import SYSTEM_TENANT, Owner, TenantId

__all__ = [
    "SYSTEM",
    "Identity",
    "apply_identity",
    "current_identity",
    "tenant_of_id",
    "unscope_output",
]

# What a client may send, but only the operator or SGLang's own components may decide.
_OPERATOR_FIELDS = (
    "priority",
    "routed_dp_rank",
    "data_parallel_rank",
    "disagg_prefill_dp_rank",
    "routing_key",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "decode_tp_size",
    "http_worker_ipc",
    "kv_hints",
    "lora_id",
    # SGLang believes these hashes, and its cache of image embeddings is one for all tenants.
    "mm_hashes",
    "need_wait_for_mm_inputs",
    "num_items_assigned",
    "encoder_urls",
)
# Tensors that SGLang's own code puts in; a client can only send something else.
_TENSOR_FIELDS = ("positional_embed_overrides", "embed_overrides")
# SGLang passes these on unchecked, and the scheduler of all tenants ends on a wrong type.
_SESSION_PARAMS = {
    "id": str,
    "rid": str,
    "offset": int,
    "replace": bool,
    "drop_previous_output": bool,
}


@dataclass(frozen=True)
class Identity:
    """The tenant a request belongs to and the owner of what it computes.

    ``no_store``: the client asked that the request neither reads nor leaves cached pages.
    ``key``: the fingerprint of the key that was sent, for the audit log. ``tag``: what the client
    said about the pages that the request leaves.
    """

    tenant: TenantId
    owner: Owner
    no_store: bool = False
    key: str = field(default="", compare=False)
    tag: RequestTag = NO_TAG

    @property
    def id_prefix(self) -> str:
        """What every request and session id of this tenant begins with inside the engine."""
        return "" if self.tenant == SYSTEM_TENANT else f"{self.tenant}/"

    def scope(self, client_id: str) -> str:
        """Return the engine's name of an id that the client calls ``client_id``."""
        return self.id_prefix + client_id

    def unscope(self, engine_id: str) -> str:
        """Undo ``scope``; an id that is not this tenant's is returned as it is."""
        return engine_id.removeprefix(self.id_prefix)


SYSTEM = Identity(SYSTEM_TENANT, SYSTEM_OWNER)
"""The identity of warm-up, health checks and the operator's own requests."""

current_identity: ContextVar[Identity] = ContextVar("current_identity", default=SYSTEM)
"""Set by the authentication middleware; asyncio tasks of the request inherit it."""


def tenant_of_id(engine_id: str) -> TenantId:
    """Return the tenant that an engine id belongs to, in O(length)."""
    tenant, slash, _ = engine_id.partition("/")
    return TenantId(tenant) if slash else SYSTEM_TENANT


def apply_identity(request: Any, identity: Identity) -> None:
    """Overwrite, in place, every field of an SGLang request that decides whose it is.

    ``request`` is a GenerateReqInput or EmbeddingReqInput before normalisation, so that a field may
    still be one value or a list. Raises ValueError, which SGLang answers with 400, when an id or a
    cache key is not text, or when the request cannot be kept out of the cache.
    """
    request.rid = _scoped_rid(_given_rid(request), identity)
    for name in _OPERATOR_FIELDS:
        if getattr(request, name, None) is not None:
            setattr(request, name, None)
    if identity.id_prefix:
        request.log_metrics = True
    for name in _TENSOR_FIELDS:
        if _is_json(getattr(request, name, None)):
            setattr(request, name, None)
    if hasattr(request, "extra_key"):
        request.extra_key = _framed(request.extra_key, identity)
    elif identity.no_store:
        raise ValueError("Cache-Control: no-store is supported for generation only")
    elif identity.tag.ttl_ms is not None:
        raise ValueError("X-KV-TTL is supported for generation only")
    _scope_session(request, identity)


def unscope_output(output: Any, identity: Identity) -> None:
    """Give a response, or a list of them, the ids that the client knows, in place."""
    for item in output if isinstance(output, list) else [output]:
        meta = item.get("meta_info")
        if meta and "id" in meta:
            meta["id"] = identity.unscope(meta["id"])


def _given_rid(request: Any) -> Any:
    """Return the client's id, or a fresh one: SGLang expands one id to a batch of generation
    requests, but wants one for each part of a batch of embeddings."""
    if request.rid is not None:
        return request.rid
    if hasattr(request, "extra_key"):
        return uuid.uuid4().hex
    parts = _embedding_parts(request)
    return uuid.uuid4().hex if parts is None else [uuid.uuid4().hex for _ in parts]


def _embedding_parts(request: Any) -> list[Any] | None:
    """Return the parts of a batch of embeddings, or None for a single one, as SGLang decides."""
    if request.text is not None:
        return request.text if isinstance(request.text, list) else None
    if request.input_ids:
        return request.input_ids if isinstance(request.input_ids[0], list) else None
    media = request.image_data or request.video_data or request.audio_data
    batch = isinstance(media, list) and all(isinstance(item, list) for item in media)
    return media if batch else None


def _scoped_rid(rid: Any, identity: Identity) -> Any:
    if isinstance(rid, list):
        return [_scoped_rid(_text("rid", item), identity) for item in rid]
    if not identity.id_prefix and "/" in _text("rid", rid):
        raise ValueError("a request id of the operator may not contain '/': it would be a tenant's")
    return identity.scope(_text("rid", rid))


def _framed(client_key: Any, identity: Identity) -> Any:
    if isinstance(client_key, list):
        return [_framed(item, identity) for item in client_key]
    once = uuid.uuid4().hex if identity.no_store else ""
    return attach(identity.tag, frame(identity.owner, _text("extra_key", client_key or ""), once))


def _scope_session(request: Any, identity: Identity) -> None:
    if getattr(request, "session_id", None) is not None:
        request.session_id = identity.scope(_text("session_id", request.session_id))
    if getattr(request, "session_params", None) is not None:
        params = _checked_session(request.session_params)
        scoped = {name: identity.scope(params[name]) for name in ("id", "rid") if name in params}
        request.session_params = {**params, **scoped}


def _checked_session(params: Any) -> dict[str, Any]:
    """Return the session parameters that are set, each of the type that SGLang declares."""
    if not isinstance(params, dict):
        raise ValueError(f"session_params should be an object, got {type(params).__name__}")
    given = {name: value for name, value in params.items() if value is not None}
    for name, value in given.items():
        expected = _SESSION_PARAMS.get(name)
        if expected is None:
            raise ValueError(f"session_params has no field {name!r}")
        if type(value) is not expected:
            raise ValueError(f"session_params.{name} should be of type {expected.__name__}")
    return given


def _is_json(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_json(item) for item in value)
    return value is None or isinstance(value, (dict, str, int, float))


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} should be a string, got {type(value).__name__}")
    return value

"""Which routes need which key. What is not listed needs the admin key, so that a new route of a
later SGLang is closed until somebody has looked at it."""

import re
from enum import StrEnum

__all__ = ["Access", "Dialect", "access_of", "dialect_of"]


class Access(StrEnum):
    """Who may call a route."""

    OPEN = "open"
    TENANT = "tenant"
    METRICS = "metrics"
    ADMIN = "admin"


class Dialect(StrEnum):
    """The API family of a route, which decides how an error is written."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    OLLAMA = "ollama"
    NATIVE = "native"


# The page for people holds no data; what it asks for needs the admin key.
_PAGE = frozenset({"/ext/ui", "/ext/ui/", "/ext/ui/app.js", "/ext/ui/draw.js", "/ext/ui/style.css"})
_OPEN = frozenset({"/health", "/health_generate", "/ready", "/ping"})
# Not /vertex_generate: SGLang does not check its fields, and a wrong one ends the scheduler.
_TENANT = frozenset(
    {
        "/generate",
        "/encode",
        "/classify",
        "/abort_request",
        "/open_session",
        "/close_session",
        "/parse_function_call",
        "/separate_reasoning",
        "/model_info",
        "/get_model_info",
        "/tokenize",
        "/detokenize",
        "/invocations",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/v1/classify",
        "/v1/rerank",
        "/v1/score",
        "/v1/decisions",
        "/v1/tokenize",
        "/v1/detokenize",
        "/v1/audio/transcriptions",
        "/v1/realtime",
        "/v1/models",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/systemone",
        "/api/chat",
        "/api/generate",
        "/api/tags",
        "/api/show",
    }
)
_TENANT_PATTERN = re.compile(
    r"/v1/models/.+|/v1/responses/[^/]+(/cancel)?|/ext/v1/(flush|pins|usage)|/ext/v1/sessions(/.+)?"
)
_DIALECTS = (
    ("/v1/messages", Dialect.ANTHROPIC),
    ("/v1/", Dialect.OPENAI),
    ("/api/", Dialect.OLLAMA),
)


def access_of(path: str) -> Access:
    """Return who may call ``path`` (decoded, without the root path and the query), in O(1)."""
    if path in _OPEN or path in _PAGE:
        return Access.OPEN
    if path in _TENANT or _TENANT_PATTERN.fullmatch(path):
        return Access.TENANT
    if path.startswith("/metrics"):
        return Access.METRICS
    return Access.ADMIN


def dialect_of(path: str) -> Dialect:
    """Return the API family that ``path`` belongs to."""
    for prefix, dialect in _DIALECTS:
        if path.startswith(prefix):
            return dialect
    return Dialect.NATIVE

"""What a refused client reads, in the error format of the route that it called."""

import json

from sglang_ext.tenancy.routes import Dialect

__all__ = ["refusal_body"]

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    502: "api_error",
    503: "overloaded_error",
}
_OPENAI_CODES = {
    400: "invalid_header",
    401: "invalid_api_key",
    403: "insufficient_permissions",
    429: "rate_limit_exceeded",
    502: "bad_gateway",
    503: "service_unavailable",
}


def refusal_body(dialect: Dialect, status: int, message: str) -> bytes:
    """Return the JSON body of a refusal with HTTP ``status`` 400, 401, 403, 429, 502 or 503."""
    return json.dumps(_document(dialect, status, message)).encode()


def _document(dialect: Dialect, status: int, message: str) -> dict[str, object]:
    if dialect is Dialect.ANTHROPIC:
        kind = _ANTHROPIC_TYPES[status]
        return {"type": "error", "error": {"type": kind, "message": message}}
    if dialect is Dialect.OPENAI:
        code = _OPENAI_CODES[status]
        kind = "invalid_request_error" if status < 500 else "server_error"
        error = {"message": message, "type": kind, "param": None, "code": code}
        return {"error": error}
    if dialect is Dialect.OLLAMA:
        return {"error": message}
    return {"error": {"message": message, "code": status}}

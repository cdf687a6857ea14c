"""What a client may ask for in headers, whatever the route: checked here, so that a wrong value is
refused before anything is computed."""

from collections.abc import Iterable

from sglang_ext.request_tag import RequestTag, check_session_name
from sglang_ext.tenancy.units import parse_duration

__all__ = ["no_store", "request_tag"]

Headers = Iterable[tuple[bytes, bytes]]

_SESSION = "X-Session-Id"
_TTL = "X-KV-TTL"


def no_store(headers: Headers) -> bool:
    """Tell whether the client asked to stay out of the cache, as RFC 9111 spells it."""
    return any(b"no-store" in value.lower() for value in _values(headers, "cache-control"))


def request_tag(headers: Headers) -> RequestTag:
    """Return the session and the lifetime that the client names.

    Raises ValueError that says which header is wrong, and what was expected.
    """
    session, ttl = (_one(headers, name) for name in (_SESSION, _TTL))
    return RequestTag(
        "" if session is None else _checked_session(session),
        None if ttl is None else _milliseconds(ttl),
    )


def _checked_session(value: str) -> str:
    try:
        return check_session_name(value)
    except ValueError as error:
        raise ValueError(f"{_SESSION}: {error}") from error


def _milliseconds(value: str) -> int:
    try:
        return max(1, round(parse_duration(value) * 1000))
    except ValueError as error:
        raise ValueError(f"{_TTL}: found {value[:32]!r}, expected {error}") from error


def _one(headers: Headers, name: str) -> str | None:
    values = _values(headers, name)
    if len(values) > 1:
        raise ValueError(f"{name}: found {len(values)} of them, expected one")
    return values[0].decode("latin-1").strip() if values else None


def _values(headers: Headers, name: str) -> list[bytes]:
    wanted = name.lower().encode()
    return [value for found, value in headers if found.lower() == wanted]

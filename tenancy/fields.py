"""Readers: functions from a raw value and its dotted path to a checked value, or a PolicyError.

Small readers (`whole`, `choice`, `size`) read one field; `Section`, `MapOf` and `ListOf` put them
together. Every error names the path, what was found, and what was expected. No error repeats a key.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Generic, TypeVar

from sglang_ext.errors import PolicyError
from sglang_ext.tenancy.keys import KEY_PREFIX, is_digest
from sglang_ext.tenancy.policy import ApiKey
from sglang_ext.tenancy.units import Size, SizeUnit, parse_duration, parse_size

__all__ = [
    "ListOf",
    "MapOf",
    "Reader",
    "Section",
    "api_keys",
    "byte_size",
    "choice",
    "did_you_mean",
    "duration",
    "flag",
    "host_port",
    "join",
    "moment",
    "name",
    "number",
    "size",
    "text",
    "top",
    "whole",
    "wrong",
]

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)

Reader = Callable[[object, str], T]
"""Takes the raw value and its dotted path."""

_RESERVED_NAMES = frozenset({"system", "other", "reject"})
"""The built-in tenant, the metrics' label for the rest, and a value of ``unknown_key``."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NOT_A_NAME = (KEY_PREFIX, "HEALTH_CHECK")
"""Beginnings of a key, and of the request ids that SGLang drops when it is busy."""
_NAME_EXPECTED = "a name of 1 to 64 letters, digits, dots, dashes and underscores"
_TOP = re.compile(r"top ([1-9][0-9]{0,3})")
_HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):([0-9]{1,5})")
_NOT_TEXT = re.compile("[\0\ud800-\udfff]")
_KEY = re.compile(re.escape(KEY_PREFIX) + r"[A-Za-z0-9_-]+")
_KEY_EXPECTED = "expected sha256:<64 hex digits>; run sglang-ext keygen"
_KEY_FORM = "expected sha256:<64 hex digits>, or {key: sha256:<64 hex digits>, until: <time>}"
_SHOWN_CHARACTERS = 60


def wrong(path: str, value: object, expected: str) -> PolicyError:
    """The error for a value that is not what was expected."""
    return PolicyError(path, f"found {_shown(value)}, expected {expected}")


def join(path: str, key: str) -> str:
    """The path of a field below ``path``, on one line and without a key in it."""
    part = key if key.isprintable() and len(key) <= _SHOWN_CHARACTERS + 4 else _quoted(key)
    part = _KEY.sub(f"{KEY_PREFIX}...", part)
    return f"{path}.{part}" if path else part


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`` (did you mean x?)`` with the nearest known word, or nothing."""
    nearest = difflib.get_close_matches(word[:_SHOWN_CHARACTERS], known, n=1)
    return f" (did you mean {nearest[0]}?)" if nearest else ""


def whole(low: int, high: int) -> Reader[int]:
    """A whole number in ``[low, high]``."""

    def read(value: object, path: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise wrong(path, value, f"a whole number from {low} to {high}")
        return value

    return read


def number(low: float, high: float) -> Reader[float]:
    """A number in ``[low, high]``."""
    expected = f"a number from {low:g} to {high:g}"

    def read(value: object, path: str) -> float:
        # bool is an int to Python, never to a reader of the file.
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong(path, value, expected)
        if not low <= value <= high:
            raise wrong(path, value, expected)
        return float(value)

    return read


def flag(value: object, path: str) -> bool:
    """``true`` or ``false``."""
    if not isinstance(value, bool):
        raise wrong(path, value, "true or false")
    return value


def text(value: object, path: str) -> str:
    """Text that is not empty."""
    if not isinstance(value, str) or not value or _NOT_TEXT.search(value):
        raise wrong(path, value, "text (in quotes)")
    return value


def host_port(value: object, path: str) -> str:
    """A machine and a port."""
    match = _HOST_PORT.fullmatch(value) if isinstance(value, str) else None
    if match is None or not 0 < int(match[2]) < 65536:
        raise wrong(path, value, "a machine and a port, such as kv-master:50051")
    return match[0]


def choice(kind: type[E]) -> Reader[E]:
    """One of the values of an enum."""

    def read(value: object, path: str) -> E:
        if not isinstance(value, str) or value not in list(kind):
            raise wrong(path, value, f"one of {', '.join(kind)}")
        return kind(value)

    return read


def size(value: object, path: str) -> Size:
    """A size, see `parse_size`."""
    return _parsed(parse_size, value, path)


def byte_size(value: object, path: str) -> Size:
    """A size in bytes, above 0."""
    parsed = size(value, path)
    if parsed.unit is not SizeUnit.BYTES or not parsed.amount:
        raise wrong(path, value, "a size in bytes above 0, such as 256GB")
    return parsed


def duration(value: object, path: str) -> float:
    """A duration in seconds, see `parse_duration`."""
    return _parsed(parse_duration, value, path)


def name(value: object, path: str) -> str:
    """The name of a tenant, a group or a public prefix."""
    if not isinstance(value, str) or not _NAME.fullmatch(value) or value.startswith(_NOT_A_NAME):
        raise wrong(path, value, _NAME_EXPECTED)
    if value in _RESERVED_NAMES:
        raise wrong(
            path, value, f"another name ({', '.join(sorted(_RESERVED_NAMES))} are reserved)"
        )
    return value


def top(value: object, path: str) -> int:
    """``top N``, as N."""
    match = _TOP.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise wrong(path, value, "top N with N from 1 to 9999, such as top 50")
    return int(match[1])


def moment(value: object, path: str) -> datetime:
    """A time with its zone, as ISO 8601 writes it."""
    try:
        read = datetime.fromisoformat(value if isinstance(value, str) else "")
    except ValueError:
        read = None
    if read is None or read.tzinfo is None:
        raise wrong(path, value, "a time with its zone, such as 2026-12-31T00:00:00Z")
    return read


def api_keys(value: object, path: str) -> tuple[ApiKey, ...]:
    """Keys by digest. What stands for a digest is never repeated: it may be a key in clear text."""
    if not isinstance(value, list):
        raise PolicyError(path, "expected a list of sha256:<64 hex digits>")
    return tuple(_api_key(item, f"{path}[{index}]") for index, item in enumerate(value))


def _api_key(value: object, path: str) -> ApiKey:
    if not isinstance(value, dict):
        return ApiKey(_digest(value, path))
    if "key" not in value or not value.keys() <= {"key", "until"}:
        raise PolicyError(path, _KEY_FORM)
    until = moment(value["until"], f"{path}.until") if "until" in value else None
    return ApiKey(_digest(value["key"], f"{path}.key"), until)


def _digest(value: object, path: str) -> str:
    if not isinstance(value, str) or not is_digest(value):
        raise PolicyError(path, _KEY_EXPECTED)
    return value


@dataclass(frozen=True)
class Section(Generic[T]):
    """Reads a mapping with known fields and gives those that are set to ``build`` by name."""

    build: Callable[..., T]
    fields: Mapping[str, Reader[Any]]
    required: tuple[str, ...] = ()

    def __call__(self, value: object, path: str) -> T:
        given = _mapping(value, path)
        for key in given:
            if key not in self.fields:
                raise PolicyError(join(path, key), f"unknown field{did_you_mean(key, self.fields)}")
        for key in self.required:
            if key not in given:
                raise PolicyError(join(path, key), "missing, this field is required")
        return self.build(**{k: self.fields[k](item, join(path, k)) for k, item in given.items()})


@dataclass(frozen=True)
class MapOf(Generic[T]):
    """Reads a mapping from names to values of one kind."""

    item: Reader[T]

    def __call__(self, value: object, path: str) -> dict[str, T]:
        given = _mapping(value, path)
        return {
            name(key, join(path, key)): self.item(v, join(path, key)) for key, v in given.items()
        }


@dataclass(frozen=True)
class ListOf(Generic[T]):
    """Reads a list of values of one kind."""

    item: Reader[T]

    def __call__(self, value: object, path: str) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise wrong(path, value, "a list")
        return tuple(self.item(item, f"{path}[{index}]") for index, item in enumerate(value))


def _mapping(value: object, path: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise wrong(path, value, "a mapping of fields")
    return value


def _parsed(parse: Callable[[str], T], value: object, path: str) -> T:
    try:
        # A number without a unit fails in `parse` with the right message.
        return parse(value if isinstance(value, str) else "")
    except ValueError as error:
        raise wrong(path, value, str(error)) from None


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "a mapping"
    return _quoted(value) if isinstance(value, str) else str(value)


def _quoted(value: str) -> str:
    hidden = _KEY.sub(f"{KEY_PREFIX}...", value)
    if len(hidden) > _SHOWN_CHARACTERS:
        hidden = hidden[:_SHOWN_CHARACTERS] + "..."
    return repr(hidden)

"""The policy as the plain data that its file holds: read, written, shown and told apart."""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

import yaml

from sglang_ext.errors import PolicyError
from sglang_ext.tenancy.fields import join
from sglang_ext.tenancy.keys import fingerprint, is_digest

__all__ = ["KEY_FIELDS", "masked", "read_json", "version_of", "write_yaml"]

KEY_FIELDS = frozenset({"api_keys", "admin_keys"})
"""Fields whose value is a list of keys."""

_MAX_DEPTH = 16
_MOST_DECIMALS = 15
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
# What some reader of YAML takes for something else than text.
_NOT_PLAIN = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})


def version_of(document: Mapping[str, Any]) -> str:
    """Return 16 hex digits that are the same for equal documents, whatever their order."""
    text = json.dumps(document, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def masked(document: Any) -> Any:
    """Return a copy in which every key's digest is cut to its fingerprint."""
    if isinstance(document, Mapping):
        return {name: masked(value) for name, value in document.items()}
    if isinstance(document, list):
        return [masked(item) for item in document]
    if isinstance(document, str) and is_digest(document):
        return fingerprint(document) + "..."
    return document


def read_json(text: str) -> Any:
    """Return what JSON text holds. Raises PolicyError for whatever the file's YAML refuses too."""
    try:
        document = json.loads(text, object_pairs_hook=_once, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise PolicyError("", f"not valid JSON at {where}: {error.msg}") from None
    except (RecursionError, ValueError):
        # Python bounds the digits of a number, and the depth.
        raise PolicyError("", "not valid JSON: nested too deeply, or a number too long") from None
    _check_depth(document, 0)
    return document


def write_yaml(document: Mapping[str, Any]) -> str:
    """Return text that ``read_yaml`` reads as ``document``."""
    text: str = yaml.dump(
        dict(document), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100
    )
    return text


class _Dumper(yaml.SafeDumper):
    """Quotes all text that any reader of YAML could take for a number, a time or a word of YAML."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: _Dumper, text: str) -> yaml.Node:
    plain = _PLAIN.fullmatch(text) and text.lower() not in _NOT_PLAIN
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


def _float(dumper: _Dumper, number: float) -> yaml.Node:
    if len(repr(number).partition(".")[2]) <= _MOST_DECIMALS:
        return dumper.represent_float(number)
    # 17 digits are exact, and the reader takes at most 18 behind the point.
    return dumper.represent_scalar("tag:yaml.org,2002:float", f"{number:.16e}")


_Dumper.add_representer(str, _text)
_Dumper.add_representer(float, _float)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise PolicyError(join("", name), "found twice, expected once")
        found[name] = value
    return found


def _refuse_constant(name: str) -> Any:
    raise PolicyError("", f"not valid JSON: {name} is no number")


def _check_depth(value: Any, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise PolicyError("", "not valid JSON: nested too deeply")
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            _check_depth(item, depth + 1)

"""The fields of the policy file whose feature is not built yet.

A file that sets one is refused: a quota that nobody enforces is worse than none.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from sglang_ext.errors import PolicyError
from sglang_ext.tenancy.fields import join

__all__ = ["NOT_YET", "NotYet", "refuse_unsupported"]


@dataclass(frozen=True)
class NotYet:
    """A field (``*`` is any tenant), and the feature that it comes with."""

    path: str
    feature: str
    values: frozenset[str] = frozenset()
    """Only these values are missing; empty: the whole field, with all fields below it."""


NOT_YET: tuple[NotYet, ...] = ()


def refuse_unsupported(data: object) -> None:
    """Raise PolicyError when the raw file sets a field, or a value, of `NOT_YET`.

    ``data`` may have any shape: what does not look like a policy is left to the parser.
    """
    for row in NOT_YET:
        for path, value in _found(data, row.path.split("."), ""):
            if not row.values:
                raise PolicyError(path, f"not supported yet (comes with {row.feature})")
            if isinstance(value, str) and value in row.values:
                problem = f"{value} is not supported yet (comes with {row.feature})"
                raise PolicyError(path, problem)


def _found(data: object, parts: list[str], path: str) -> Iterator[tuple[str, object]]:
    """Every value at ``parts`` below ``data``, with its path."""
    if not parts:
        yield path, data
    elif isinstance(data, dict):
        keys = list(data) if parts[0] == "*" else [key for key in data if key == parts[0]]
        for key in keys:
            yield from _found(data[key], parts[1:], join(path, key))

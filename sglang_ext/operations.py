"""What the operator may ask of the process that owns the tree (see ``patches.admin_channel``)."""

from collections.abc import Mapping
from typing import Any

from sglang_ext.patches.admin_channel import Operation
from sglang_ext.radix.dump import dump

__all__ = ["OPERATIONS"]

_MOST_RUNS = 10_000


def _tree(scheduler: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return one page of the tree's runs."""
    page, limit = (_whole(body, name) for name in ("page", "limit"))
    if not 1 <= limit <= _MOST_RUNS:
        raise ValueError(f"limit: {limit}, expected 1 to {_MOST_RUNS}")
    return dump(scheduler.tree_cache, page, limit)


def _whole(body: Mapping[str, Any], name: str) -> int:
    value = body.get(name)
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{name}: {value!r}, expected a whole number from 0")
    return value


OPERATIONS: dict[str, Operation] = {"tree": _tree}

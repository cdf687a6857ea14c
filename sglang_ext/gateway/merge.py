"""One answer out of the answers of several engines."""

import re
from collections.abc import Iterable
from typing import Any

__all__ = ["merged", "merged_metrics"]

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{?)(.*)", re.DOTALL)


def merged(first: Any, second: Any) -> Any:
    """Add up two answers of one form: mappings by name, lists end to end, numbers by sum.

    Of texts and switches the first counts. No number (None: without a limit) and a number are no
    number.
    """
    if isinstance(first, dict) and isinstance(second, dict):
        both = {name: merged(first[name], second[name]) for name in first if name in second}
        return {**first, **second, **both}
    if isinstance(first, list) and isinstance(second, list):
        return [*first, *second]
    if _is_number(first) and _is_number(second):
        return first + second
    if first is None:
        return None if _is_number(second) else second
    return None if second is None and _is_number(first) else first


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def merged_metrics(pages: Iterable[tuple[str, str]]) -> str:
    """Return one page of Prometheus' text format out of ``(engine, page)``.

    Each sample gets a label ``engine``, unless it has one; families are not repeated. O(text).
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for engine, page in pages:
        family = ""
        for line in page.split("\n"):
            if line.startswith("# "):
                family = _head(line, heads)
            elif line:
                samples.setdefault(family, []).append(_labelled(line, engine))
    lines = [line for family, found in samples.items() for line in (*heads.get(family, ()), *found)]
    return "\n".join(lines) + "\n" if lines else ""


def _head(line: str, heads: dict[str, list[str]]) -> str:
    """Note a line such as ``# TYPE name counter``, the first of its kind; return the name."""
    kind, _, rest = line[2:].partition(" ")
    name = rest.partition(" ")[0]
    known = heads.setdefault(name, [])
    if not any(other.startswith(f"# {kind} ") for other in known):
        known.append(line)
    return name


def _labelled(line: str, engine: str) -> str:
    found = _SAMPLE.fullmatch(line)
    if found is None:
        return line
    name, brace, rest = found.groups()
    if not brace:
        return f'{name}{{engine="{engine}"}}{rest}'
    if rest.startswith('engine="') or ',engine="' in rest:
        return line
    comma = "" if rest.startswith("}") else ","
    return f'{name}{{engine="{engine}"{comma}{rest}'

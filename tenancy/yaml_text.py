"""YAML text to plain Python values, for a file that decides who may read whose data.

A small part of YAML on purpose: mappings, lists, text, numbers, true, false, null. No aliases and
no tags, so that a small file cannot grow large and no text can name a Python object. Only ``true``
and ``false`` are booleans, so that a tenant may be called ``no``.
"""

import re
from typing import Any

import yaml

from sglang_ext.errors import PolicyError
from sglang_ext.tenancy.fields import join

__all__ = ["read_yaml"]

_MAX_DEPTH = 16
_INTEGER = re.compile(r"[-+]?[0-9]{1,18}")
_FLOAT = re.compile(r"[-+]?[0-9]{1,18}(\.[0-9]{0,18})?([eE][-+]?[0-9]{1,3})?")
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}
_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map")}


def read_yaml(text: str) -> object:
    """Dicts with text keys, lists, str, int, float, bool and None; None for an empty text.

    Raises PolicyError for whatever is not that.
    """
    node = _compose(text)
    return None if node is None else _plain(node, "")


class _Loader(yaml.BaseLoader):
    """Makes nodes with bounded depth and without aliases."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        mark = self.peek_event().start_mark
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(None, None, "aliases are not allowed", mark)
        if self.depth == _MAX_DEPTH:
            raise yaml.MarkedYAMLError(None, None, "nested too deeply", mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _compose(text: str) -> yaml.Node | None:
    # `from None`: PyYAML's own errors quote the line, which may hold a key.
    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        raise _invalid(error.problem_mark, problem) from None
    except yaml.YAMLError:
        raise PolicyError("", "not valid YAML: holds a character that YAML forbids") from None
    except (ValueError, OverflowError):
        # PyYAML does not check that "\UFFFFFFFF" or "%YAML 999..." are numbers in range.
        raise PolicyError("", "not valid YAML: a number in an escape is out of range") from None


def _invalid(mark: Any, problem: str) -> PolicyError:
    where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    return PolicyError("", f"not valid YAML{where}: {problem}")


def _plain(node: yaml.Node, path: str) -> object:
    if node.tag not in _TAGS:
        raise _invalid(node.start_mark, "tags are not allowed")
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, f"{path}[{index}]") for index, item in enumerate(node.value)]
    assert isinstance(node, yaml.ScalarNode)
    return _scalar(node.value, is_plain=node.style is None)


def _mapping(node: yaml.MappingNode, path: str) -> dict[str, object]:
    first_lines: dict[str, int] = {}
    values: dict[str, object] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise _invalid(key_node.start_mark, "a field's name must be text")
        key, line = key_node.value, key_node.start_mark.line + 1
        if key in values:
            lines = f"lines {first_lines[key]} and {line}"
            raise PolicyError(join(path, key), f"found twice ({lines}), expected once")
        first_lines[key] = line
        values[key] = _plain(value_node, join(path, key))
    return values


def _scalar(text: str, *, is_plain: bool) -> object:
    if not is_plain:
        return text
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text

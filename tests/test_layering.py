"""Who may import whom (one direction only), read from the source without running it."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

_ROOT = Path(__file__).parents[1]
_PARTS = ("radix", "tiering", "tenancy", "patches")
_VOCABULARY = {"types", "errors", "folders", "namespace", "request_tag"}
# What a part may import besides itself and the vocabulary.
_ALLOWED = {"radix": (), "tiering": (), "tenancy": (), "patches": ("tenancy", "tiering")}
_TOP = {"plugin", "launch_server", "cli"}
# The shells, one seam each. Every other file works, and is tested, without SGLang.
_IMPORT_SGLANG = {
    "sglang_ext/cache_backend.py",
    "sglang_ext/fetching.py",
    "sglang_ext/launch_server.py",
    "sglang_ext/operations.py",
    "sglang_ext/pins.py",
    "sglang_ext/plan/tier.py",
    "sglang_ext/policy_change.py",
    "sglang_ext/prefix_cache.py",
    "sglang_ext/prefix_flush.py",
    "sglang_ext/public_prefixes.py",
    "sglang_ext/quotas.py",
    "sglang_ext/sealing.py",
    "sglang_ext/sessions.py",
    "sglang_ext/tiers.py",
    "sglang_ext/tokenizer_metrics.py",
    "sglang_ext/traffic.py",
    "sglang_ext/warm_up.py",
    "radix/component.py",
    "radix/dump.py",
    "radix/events.py",
    "radix/hashes.py",
    "radix/host_copies.py",
    "radix/integrity.py",
    "radix/key.py",
    "radix/node.py",
    "radix/tree_core.py",
    "tiering/storage_backend.py",
    "patches/admin_channel.py",
    "patches/admission.py",
    "patches/attention_limits.py",
    "patches/cpu_attention.py",
    "patches/cpu_attention_backend.py",
    "patches/cpu_fp8_pages.py",
    "patches/cpu_kernels.py",
    "patches/flashinfer_backend.py",
    "patches/flashinfer_pages.py",
    "patches/weight_updates.py",
    "patches/preemption.py",
    "patches/cpu_ops.py",
    "patches/cpu_linear.py",
    "patches/cpu_platform_class.py",
    "patches/hicache_cpu.py",
    "patches/hooks.py",
    "patches/in_flight.py",
    "patches/schedule_policy.py",
    "patches/shutdown.py",
}


class _File(NamedTuple):
    """A source file: its place in the repository, and what it holds."""

    place: str
    source: str

    @property
    def part(self) -> str:
        """The folder: ``radix`` and the like, or ``sglang_ext``."""
        return self.place.partition("/")[0]

    @property
    def name(self) -> str:
        """The module's name below ``sglang_ext``."""
        return self.place.partition("/")[2].removesuffix(".py")


def _files() -> list[_File]:
    folders = [_ROOT / "sglang_ext", *(_ROOT / part for part in _PARTS)]
    folders += [path for path in folders[0].iterdir() if path.is_dir() and not path.is_symlink()]
    found = [path for folder in folders for path in folder.glob("*.py")]
    return [_File(str(path.relative_to(_ROOT)), path.read_text("utf-8")) for path in sorted(found)]


def _imports(tree: ast.Module) -> Iterator[str]:
    """Yield what a file imports, anywhere in it, down to the imported name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _violations(file: _File) -> list[str]:
    tree = ast.parse(file.source)
    imports = list(_imports(tree))
    found = [problem for name in imports if (problem := _forbidden(file, name))]
    shell = any(name.split(".")[0] == "sglang" for name in imports)
    if shell != (file.place in _IMPORT_SGLANG):
        found.append("imports SGLang" if shell else "is listed as a shell and imports no SGLang")
    if not ast.get_docstring(tree):
        found.append("has no docstring")
    private = file.name.rpartition("/")[2].startswith("_")
    if not private and not any(_assigns_all(node) for node in tree.body):
        found.append("has no __all__")
    return found


def _forbidden(file: _File, name: str) -> str | None:
    """Say what is wrong with one import, or None."""
    if name.startswith("."):
        return f"imports relatively: {name}"
    first, *rest = name.split(".")
    if first in _PARTS:
        return f"imports {name}, a second copy of sglang_ext.{name}"
    if first != "sglang_ext" or not rest:
        return None
    target = rest[0]
    if target in _TOP:
        return f"imports {name}, which nobody may"
    if file.part == "sglang_ext":
        upwards = file.name in _VOCABULARY and target not in _VOCABULARY
    else:
        upwards = target not in {file.part, *_VOCABULARY, *_ALLOWED[file.part]}
    return f"imports {name}, which lies above or beside it" if upwards else None


def _assigns_all(node: ast.stmt) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)


@pytest.mark.parametrize("file", _files(), ids=lambda file: file.place)
def test_layers(file: _File) -> None:
    assert _violations(file) == []


def test_every_shell_is_there() -> None:
    assert {file.place for file in _files()} >= _IMPORT_SGLANG


def test_folders_hold_no_folders() -> None:
    """A package below ``radix`` would be in neither the wheel nor this test."""
    for part in _PARTS:
        inner = [path.name for path in (_ROOT / part).iterdir() if path.is_dir()]
        assert set(inner) <= {"__pycache__"}


_HEAD = '"""Docstring."""\n__all__ = ["x"]\n'


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("sglang_ext/types.py", "import sglang_ext.metrics"),
        ("sglang_ext/namespace.py", "from sglang_ext import active"),
        ("sglang_ext/active.py", "from sglang_ext.launch_server import main"),
        ("sglang_ext/active.py", "from sglang_ext import plugin"),
        ("sglang_ext/active.py", "import radix.tree_core"),
        ("sglang_ext/active.py", "def f():\n    from tenancy import keys"),
        ("sglang_ext/active.py", "import sglang"),
        ("sglang_ext/active.py", "from sglang.srt.utils import x"),
        ("radix/clock.py", "from sglang_ext.tiering.codec import x"),
        ("radix/clock.py", "from sglang_ext import tenancy"),
        ("radix/clock.py", "from sglang_ext.prefix_cache import x"),
        ("tiering/codec.py", "from sglang_ext.radix.key import x"),
        ("tenancy/keys.py", "from sglang_ext.patches.hooks import x"),
        ("tenancy/keys.py", "from . import policy"),
        ("patches/scheduler.py", "from sglang_ext.radix.key import x"),
        ("patches/scheduler.py", "from sglang_ext.metrics import x"),
        ("patches/hooks.py", "import os"),
    ],
)
def test_a_violation_is_seen(place: str, line: str) -> None:
    assert len(_violations(_File(place, f"{_HEAD}{line}\n"))) == 1


@pytest.mark.parametrize("source", ["__all__ = []", '"""Docstring."""'])
def test_a_missing_head_is_seen(source: str) -> None:
    assert len(_violations(_File("radix/clock.py", source))) == 1


def test_what_is_allowed() -> None:
    lines = "import os\nfrom sglang_ext.tenancy import keys\nfrom sglang_ext.errors import x"
    assert _violations(_File("patches/scheduler.py", f"{_HEAD}{lines}\n")) == []

"""Registering hooks through SGLang's HookRegistry, and proving afterwards that each one applied.

SGLang logs a failed hook and goes on. For tenants that would be a server without isolation, so
``verify`` is called before the server listens and again in the process that owns the cache.
"""

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_ext.errors import HookError
from sglang_ext.patches.versions import check_signature

__all__ = ["Hook", "install", "verify"]


@dataclass(frozen=True)
class Hook:
    """One wrapped function of SGLang.

    ``target`` is its dotted name, ``function`` receives the original as its first argument, and
    ``parameters`` are the original's parameter names, checked before anything is changed.
    """

    target: str
    function: Callable[..., Any]
    parameters: tuple[str, ...]


_installed: list[Hook] = []


def install(hooks: Sequence[Hook]) -> None:
    """Check and register ``hooks``; raises HookError for a target that has changed. Idempotent.

    SGLang swallows the error, so ``verify`` counts every hook that should have been installed.
    """
    known = {hook.target for hook in _installed}
    fresh = [hook for hook in hooks if hook.target not in known]
    _installed.extend(fresh)
    for hook in fresh:
        check_signature(_resolve(hook.target), hook.parameters)
        HookRegistry.register(hook.target, hook.function, HookType.AROUND)


def verify() -> None:
    """Raise HookError unless hooks are installed and SGLang applied every one of them."""
    if not _installed:
        raise HookError(
            "the sglang_ext plugin did not run in this process; check SGLANG_PLUGINS and "
            "SGLANG_PLATFORM, and that 'pip show sglang-ext' finds the package"
        )
    missing = [hook.target for hook in _installed if not _applied(hook)]
    if missing:
        raise HookError(f"SGLang did not apply the hook on {', '.join(missing)}; see the log above")


def _resolve(target: str) -> Any:
    try:
        return pkgutil.resolve_name(target)
    except (ImportError, AttributeError) as error:
        raise HookError(f"SGLang has no {target} to hook: {error}") from error


def _applied(hook: Hook) -> bool:
    """Tell whether ``hook`` is among the functions that wrap its target."""
    wrapper = _resolve(hook.target)
    while hasattr(wrapper, "__wrapped__"):
        cells = getattr(wrapper, "__closure__", None) or ()
        if any(cell.cell_contents is hook.function for cell in cells):
            return True
        wrapper = wrapper.__wrapped__
    return False

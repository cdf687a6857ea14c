"""Which SGLang this release was written against, and how a hook on it is guarded."""

import inspect
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from sglang_ext.errors import HookError, UnsupportedError

__all__ = ["SGLANG_VERSION", "check_signature", "check_version"]

SGLANG_VERSION = "0.5.23"
"""The only release whose internals the hooks in this folder were checked against."""


def check_version() -> None:
    """Raise UnsupportedError unless the installed SGLang is exactly SGLANG_VERSION."""
    try:
        found = version("sglang")
    except PackageNotFoundError:
        found = "none"
    if found != SGLANG_VERSION:
        raise UnsupportedError(
            f"sglang {found} is installed, but this release of sglang_ext supports "
            f"exactly {SGLANG_VERSION}; run: pip install sglang=={SGLANG_VERSION}"
        )


def check_signature(function: Callable[..., object], expected: tuple[str, ...]) -> None:
    """Raise HookError unless ``function`` takes exactly the parameters named in ``expected``."""
    found = tuple(inspect.signature(inspect.unwrap(function)).parameters)
    if found != expected:
        name = getattr(function, "__qualname__", repr(function))
        raise HookError(
            f"{name} takes {found}, but the hook was written for {expected}; "
            f"sglang_ext needs sglang {SGLANG_VERSION}, unmodified"
        )

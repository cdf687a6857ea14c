"""Where the package keeps what it can make again: the demo model and compiled kernels."""

import os
from pathlib import Path

from sglang_ext.errors import FolderError

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/sglang-ext``, or ``~/.cache/sglang-ext``. Nothing is created.

    Raises FolderError for a user without a home folder.
    """
    root = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    if os.path.isabs(root):
        return Path(root, "sglang-ext")
    try:
        return Path.home() / ".cache" / "sglang-ext"
    except RuntimeError as error:
        raise FolderError(
            f"No cache folder: {error} Set XDG_CACHE_HOME to a writable folder."
        ) from error

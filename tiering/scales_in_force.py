"""The FP8 scales of this server: checked once by the launcher, read by every rank.

The launcher names the file in an environment variable, with its digest, so that a file that changes
meanwhile stops a rank instead of letting ranks differ.
"""

import os
from pathlib import Path

from xxhash import xxh3_128

from sglang_ext.errors import ScalesError
from sglang_ext.tiering.scales import Scales, load_scales

__all__ = ["DIGEST_VARIABLE", "SCALES_VARIABLE", "hand_over", "scales_digest", "scales_in_force"]

SCALES_VARIABLE = "SGLANG_EXT_KV_SCALES"
DIGEST_VARIABLE = "SGLANG_EXT_KV_SCALES_XXH3"


def hand_over(path: Path) -> None:
    """Let ``path`` hold the scales of every process that is started from now on."""
    os.environ[SCALES_VARIABLE] = str(path.resolve())
    os.environ[DIGEST_VARIABLE] = _digest(path)


def scales_digest() -> str:
    """Return what tells these scales from all others; empty without scales."""
    return os.environ.get(DIGEST_VARIABLE, "")


def scales_in_force() -> Scales | None:
    """Return the scales handed over, None without; raise ``ScalesError`` when the file changed."""
    name = os.environ.get(SCALES_VARIABLE)
    if name is None:
        return None
    path = Path(name)
    if _digest(path) != scales_digest():
        raise ScalesError(f"{path}: changed while the server was starting; start it again")
    return load_scales(path)


def _digest(path: Path) -> str:
    try:
        return xxh3_128(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ScalesError(f"{path}: cannot be read: {error}") from None

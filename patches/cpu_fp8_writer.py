"""Writes FP8 pages by the C++ kernel, or in plain torch where that is missing."""

import ctypes
import logging
from functools import cache

import torch

from sglang_ext.patches.cpu_library import load_library
from sglang_ext.tiering.feedback import learn_feedback
from sglang_ext.tiering.quantizer import FORMATS, Channels, Format, quantize

__all__ = ["Fp8Writer"]

logger = logging.getLogger(__name__)

_MAX_DIM = 256
_EQUAL_SHARE = 0.99
"""Share of codes that must be torch's own: sums in another order may tip a number near a tie."""


class Fp8Writer:
    """Turns the rows of one layer's K, or of its V, into codes."""

    def __init__(self, channels: Channels, format: Format) -> None:
        self._channels, self._format = channels, format
        self._library = _checked_library()
        # The kernel keeps no copies: these live as long as this object.
        self._tables = _tables(channels)

    def codes(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the codes, FP8 [tokens, heads, dim] without gaps, of rows of that shape."""
        library, dim = self._library, rows.shape[-1]
        packed = rows.stride()[1:] == (dim, 1)
        if library is None or rows.dtype != torch.bfloat16 or not packed or dim > _MAX_DIM:
            return quantize(rows, self._channels, self._format).codes
        return _write(library, rows, self._tables, self._format)


def _tables(channels: Channels) -> tuple[torch.Tensor | None, ...]:
    """What the kernel reads: inverse scale, mean, order, and each one's share of earlier errors."""
    feedback = channels.feedback
    return (
        channels.scale.float().reciprocal().contiguous(),
        channels.mean.float().contiguous(),
        None if feedback is None else feedback.order.contiguous(),
        None if feedback is None else feedback.spread.transpose(-2, -1).contiguous(),
    )


def _write(
    library: ctypes.CDLL,
    rows: torch.Tensor,
    tables: tuple[torch.Tensor | None, ...],
    format: Format,
) -> torch.Tensor:
    codes = torch.empty(rows.shape, dtype=format.dtype)
    name = str(format.dtype).removeprefix("torch.")
    sizes = (*rows.shape, rows.stride(0), torch.get_num_threads())
    pointers = map(_pointer, (rows, codes, *tables))
    getattr(library, f"fp8_write_{name}")(*pointers, *map(ctypes.c_int64, sizes))
    return codes


@cache
def _checked_library() -> ctypes.CDLL | None:
    """Return the kernels, None where they are missing or write something else than torch."""
    library = load_library()
    if library is None or all(_writes_as_torch(library, format) for format in FORMATS.values()):
        return library
    logger.warning("The kernel that writes FP8 pages is wrong here, and plain torch serves")
    return None


def _writes_as_torch(library: ctypes.CDLL, format: Format) -> bool:
    generator = torch.Generator().manual_seed(0)
    heads, dim = 2, 32
    rows = torch.randn(20, heads, dim, generator=generator).bfloat16()
    queries = torch.randn(heads, 50, dim, generator=generator)
    scale = torch.exp2(torch.arange(dim) % 3).expand(heads, dim).contiguous()
    feedback = learn_feedback(queries.transpose(1, 2) @ queries, scale, torch.ones(heads, dim))
    channels = Channels(scale, torch.full((heads, dim), 0.25), feedback)
    found = _write(library, rows, _tables(channels), format)
    equal = found.float() == quantize(rows, channels, format).codes.float()
    return bool(equal.float().mean() >= _EQUAL_SHARE)


def _pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p | None:
    return None if tensor is None else ctypes.c_void_p(tensor.data_ptr())

"""Writes FP8 pages: by the C++ kernel, in plain torch where that is missing, on a GPU by Triton."""

import ctypes
import logging
from collections.abc import Sequence
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
        # The kernel keeps no copies of its tables: they live as long as this object.
        self._tables = _tables(channels)
        library = _checked_library() if channels.scale.is_cpu else None
        self._write = None if library is None else _Kernel(library, self._tables, format)

    def codes(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the codes, FP8 [tokens, heads, dim] without gaps, of rows of that shape."""
        dim = rows.shape[-1]
        packed = rows.stride()[1:] == (dim, 1)
        if rows.is_cuda:
            # Imported late: a machine without a GPU has no use for it.
            from sglang_ext.tiering.triton_pages import write_codes

            return write_codes(rows if packed else rows.contiguous(), self._channels, self._format)
        if self._write is None or rows.dtype != torch.bfloat16 or not packed or dim > _MAX_DIM:
            return quantize(rows, self._channels, self._format).codes
        return self._write(rows)


class _Kernel:
    """The kernel of one format, bound to one layer's tables."""

    def __init__(
        self, library: ctypes.CDLL, tables: Sequence[torch.Tensor | None], format: Format
    ) -> None:
        self._dtype = format.dtype
        # A function of its own, not the library's: others may declare other types.
        prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 6, *[ctypes.c_int64] * 5)
        name = str(format.dtype).removeprefix("torch.")
        self._function = prototype((f"fp8_write_{name}", library))
        self._pointers = [None if table is None else table.data_ptr() for table in tables]

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        codes = torch.empty(rows.shape, dtype=self._dtype)
        sizes = (*rows.shape, rows.stride(0), torch.get_num_threads())
        self._function(rows.data_ptr(), codes.data_ptr(), *self._pointers, *sizes)
        return codes


def _tables(channels: Channels) -> tuple[torch.Tensor | None, ...]:
    """What the kernel reads: inverse scale, mean, order, and each one's share of earlier errors."""
    feedback = channels.feedback
    return (
        channels.scale.float().reciprocal().contiguous(),
        channels.mean.float().contiguous(),
        None if feedback is None else feedback.order.contiguous(),
        None if feedback is None else feedback.spread.transpose(-2, -1).contiguous(),
    )


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
    tables = _tables(channels)
    found = _Kernel(library, tables, format)(rows)
    equal = found.float() == quantize(rows, channels, format).codes.float()
    return bool(equal.float().mean() >= _EQUAL_SHARE)

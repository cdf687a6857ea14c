"""Calls the C++ attention kernels, which read pages where they lie; else plain torch serves.

Each is used only after its answer on a small batch was checked.
"""

import ctypes
import logging
from functools import cache
from typing import Any

import torch

from sglang_ext.patches.cpu_attention_meta import ExtendPlan, Reach, SlotList, Step
from sglang_ext.patches.cpu_attention_ops import Scoring, attend_decode, attend_extend, gather
from sglang_ext.patches.cpu_library import load_library

__all__ = ["DecodeKernel", "ExtendKernel", "load_decode_kernel", "load_extend_kernel"]

logger = logging.getLogger(__name__)

_NARROW_TYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
_LANES = 16


class _Shape(ctypes.Structure):
    """``Shape`` of the decode kernel, field for field."""

    _fields_ = [
        ("requests", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("value_width", ctypes.c_int64),
        ("key_stride", ctypes.c_int64),
        ("value_stride", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
    ]


class _ExtendShape(ctypes.Structure):
    """``ExtendShape`` of the extend kernel, field for field."""

    _fields_ = [
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("value_width", ctypes.c_int64),
        ("key_stride", ctypes.c_int64),
        ("value_stride", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
    ]


class DecodeKernel:
    """Decode attention, one new token a request."""

    page_types = (torch.float32, *_NARROW_TYPES)

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions = _functions(library, "decode", self.page_types)

    def takes(self, query: torch.Tensor, keys: torch.Tensor, value_width: int) -> bool:
        """Whether this kernel reads pages of that type and width."""
        return keys.dtype in self.page_types and _fits(keys, value_width)

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: SlotList,
        scoring: Scoring,
    ) -> torch.Tensor:
        """Attend one new token a request: ``[n, heads, width]`` over ``[slots, kv_heads, width]``.

        ``values`` may be the first columns of ``keys``, with one KV head. Returns float32
        ``[n, heads, value_width]``.
        """
        n, heads, width = query.shape
        query = query.float().contiguous()
        output = query.new_empty(n, heads, values.shape[-1])
        shape = _Shape(
            requests=n,
            heads=heads,
            kv_heads=keys.shape[1],
            width=width,
            value_width=values.shape[-1],
            key_stride=keys.stride(0),
            value_stride=values.stride(0),
            threads=torch.get_num_threads(),
            scale=scoring.scale,
            soft_cap=scoring.soft_cap,
        )
        tensors = (query, keys, values, slots.slots, slots.starts, output)
        self._functions[keys.dtype](ctypes.byref(shape), *map(_pointer, tensors))
        return output


class ExtendKernel:
    """Attention of bfloat16 rows, many new tokens a request."""

    page_types = _NARROW_TYPES

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raises AttributeError where the processor has no products of bfloat16."""
        self._functions = _functions(library, "extend", self.page_types)

    def takes(self, query: torch.Tensor, keys: torch.Tensor, value_width: int) -> bool:
        """Whether this kernel takes that query, and reads pages of that type and width."""
        known = query.dtype == torch.bfloat16 and keys.dtype in self.page_types
        return known and _fits(keys, value_width)

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: ExtendPlan,
        scoring: Scoring,
    ) -> torch.Tensor:
        """Attend all new rows: ``[rows, heads, width]`` over ``[slots, kv_heads, width]``.

        ``values`` may be the first columns of ``keys``, with one KV head. Returns bfloat16
        ``[rows, heads, value_width]``; rows of no run are left undefined.
        """
        rows, heads, width = query.shape
        query = query.contiguous()
        output = query.new_empty(rows, heads, values.shape[-1])
        shape = _ExtendShape(
            heads=heads,
            kv_heads=keys.shape[1],
            width=width,
            value_width=values.shape[-1],
            key_stride=keys.stride(0),
            value_stride=values.stride(0),
            threads=torch.get_num_threads(),
            window=plan.window,
            scale=scoring.scale,
            soft_cap=scoring.soft_cap,
        )
        runs = plan.listed
        tensors = (query, keys, values, runs.slots, runs.runs)
        count = ctypes.c_int64(len(runs.runs))
        function = self._functions[keys.dtype]
        function(ctypes.byref(shape), *map(_pointer, tensors), count, _pointer(output))
        return output


@cache
def load_decode_kernel() -> DecodeKernel | None:
    """Return this machine's decode kernel; None, with a line in the log, without one."""
    library = load_library()
    if library is None:
        return None
    kernel = DecodeKernel(library)
    if not _decodes_rightly(kernel):
        logger.warning("Decode attention falls back to plain torch: its kernel computes wrongly")
        return None
    return kernel


@cache
def load_extend_kernel() -> ExtendKernel | None:
    """Return this machine's extend kernel; None without bfloat16 products or a right answer."""
    library = load_library()
    if library is None or not hasattr(library, "extend_bfloat16"):
        return None
    kernel = ExtendKernel(library)
    if not _extends_rightly(kernel):
        logger.warning("Prefill attention falls back to plain torch: its kernel computes wrongly")
        return None
    return kernel


def _functions(
    library: ctypes.CDLL, name: str, types: tuple[torch.dtype, ...]
) -> dict[torch.dtype, Any]:
    return {each: getattr(library, f"{name}_{str(each).removeprefix('torch.')}") for each in types}


def _fits(keys: torch.Tensor, value_width: int) -> bool:
    whole = keys.shape[-1] % _LANES == 0 and value_width % _LANES == 0
    return whole and keys.stride()[1:] == (keys.shape[-1], 1)


def _pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _decodes_rightly(kernel: DecodeKernel) -> bool:
    """Compare the kernel with plain torch on two requests of unlike length."""
    query, keys, table = _small_batch(2, torch.float32)
    reach, scoring = Reach(-1, False), Scoring(0.1, 3.0)
    step = Step(table, torch.arange(2), [128, 70], None, torch.float32)
    found = kernel.attend(query, keys, keys, step.ragged(reach), scoring)
    for group in step.decode(reach):
        pages = gather(keys, group.slots, torch.float32)
        expected = attend_decode(query[group.requests], pages, pages, group, scoring)
        if not torch.allclose(found[group.requests], expected, rtol=1e-4, atol=1e-4):
            return False
    return True


def _extends_rightly(kernel: ExtendKernel) -> bool:
    """Compare the kernel with plain torch on a hit and a cold prompt, under a window."""
    query, keys, table = _small_batch(28 + 70, torch.bfloat16)
    scoring = Scoring(0.1, 3.0)
    step = Step(table, torch.arange(2), [128, 70], [100, 0], torch.bfloat16)
    plan = step.extend(Reach(40, False))
    found = kernel.attend(query, keys, keys, plan, scoring)
    for run in plan.runs:
        pages = gather(keys, run.slots, torch.bfloat16)
        expected = attend_extend(query[run.begin : run.end], pages, pages, run, plan, scoring)
        if not torch.allclose(found[run.begin : run.end], expected, rtol=5e-2, atol=3e-2):
            return False
    return True


def _small_batch(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(rows, 6, 80, generator=generator).to(dtype)
    keys = torch.randn(256, 2, 80, generator=generator).to(dtype)
    return query, keys, torch.randperm(256, generator=generator).int().view(2, 128)

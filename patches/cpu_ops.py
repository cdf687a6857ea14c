"""Norm, activation and rotary embedding in one pass each, where SGLang runs chains of small ops.

Each replaces SGLang's own for the exact class that it was written for, through the registry that
SGLang has for platforms like ours. What the kernels do not take (another type than bfloat16, an
option that few models use) goes to SGLang's own operator, call by call.
"""

import ctypes
from typing import Any

import torch

from sglang_ext.patches.cpu_library import load_library

__all__ = ["register_ops", "rms_norm", "rotary", "silu_and_mul"]

_LANES = 16


def register_ops(platform_key: str) -> bool:
    """Make SGLang call the kernels; False, and nothing changed, where there are none.

    Has to run before the first forward pass: SGLang resolves each operator once.
    """
    library = load_library()
    if library is None:
        return False
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.layers.rotary_embedding.rope_variant import Llama3RotaryEmbedding

    functions = {
        RMSNorm: _norm_forward,
        SiluAndMul: _activation_forward,
        RotaryEmbedding: _rotary_forward,
        Llama3RotaryEmbedding: _rotary_forward,
    }
    for kind, function in functions.items():
        BaseFusedOp.register_oot_forward(kind, function, platform_key)
    return True


def rms_norm(
    library: ctypes.CDLL,
    x: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """Return the norm of ``[..., width]`` rows, or of ``x + residual``, kept in ``residual``.

    All bfloat16 without gaps, ``width`` a multiple of 16. The sum is normed before it is rounded.
    """
    output, width = torch.empty_like(x), x.shape[-1]
    library.rms_norm(
        _pointer(x),
        None if residual is None else _pointer(residual),
        _pointer(weight),
        _pointer(output),
        *map(ctypes.c_int64, (x.numel() // width, width)),
        ctypes.c_float(epsilon),
        _threads(),
    )
    return output


def silu_and_mul(library: ctypes.CDLL, x: torch.Tensor) -> torch.Tensor:
    """Return ``silu(first half) * second half`` of bfloat16 rows without gaps."""
    width = x.shape[-1] // 2
    output = x.new_empty(*x.shape[:-1], width)
    rows = output.numel() // width
    sizes = map(ctypes.c_int64, (rows, width))
    library.silu_and_mul(_pointer(x), _pointer(output), *sizes, _threads())
    return output


def rotary(
    library: ctypes.CDLL, x: torch.Tensor, width: int, positions: torch.Tensor, cache: torch.Tensor
) -> None:
    """Rotate bfloat16 ``[rows, heads * width]`` in place; rows may lie apart.

    ``positions``: int64 ``[rows]``. ``cache``: cosines, then sines, ``[positions, width]``.
    """
    name = str(cache.dtype).removeprefix("torch.")
    sizes = (x.shape[0], x.shape[1] // width, width, x.stride(0))
    getattr(library, f"rotary_{name}")(
        _pointer(x),
        *map(ctypes.c_int64, sizes),
        _pointer(positions),
        _pointer(cache),
        _threads(),
    )


def _norm_forward(
    norm: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
    quant_linear: Any = None,
) -> Any:
    library = load_library()
    plain = (
        not norm.cast_x_before_out_mul
        and not norm.fp32_residual
        and norm.override_orig_dtype is None
        and norm.variance_size_override is None
        and post_residual_addition is None
    )
    tensors = [each for each in (x, residual, norm.weight) if each is not None]
    fits = x.shape[-1] == norm.hidden_size and (residual is None or residual.shape == x.shape)
    if library is None or not (plain and fits and all(map(_takes, tensors))):
        return norm.forward_native(x, residual, post_residual_addition, quant_linear)
    output = rms_norm(library, x, norm.weight, norm.variance_epsilon, residual)
    return output if residual is None else (output, residual)


def _activation_forward(activation: Any, x: torch.Tensor) -> torch.Tensor:
    library = load_library()
    if library is None or not _takes(x) or x.shape[-1] % (2 * _LANES):
        return activation.forward_native(x)
    return silu_and_mul(library, x)


def _rotary_forward(
    embedding: Any,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: torch.Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    library, cache = load_library(), embedding.cos_sin_cache
    whole = (
        embedding.is_neox_style
        and embedding.rotary_dim == embedding.head_size
        and embedding.head_size % (2 * _LANES) == 0
        and not hasattr(embedding, "sin_cos_cache")
        and cache.dtype in (torch.float32, torch.bfloat16)
        and cache.is_contiguous()
    )
    plain = offsets is None and fused_set_kv_buffer_arg is None and positions.dim() == 1
    rows = all(each.dim() == 2 and _is_rows(each) for each in (query, key))
    if library is None or not (whole and plain and rows and positions.dtype == torch.int64):
        return embedding.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
    positions = positions.contiguous()
    for each in (query, key):
        rotary(library, each, embedding.head_size, positions, cache)
    return query, key


def _takes(x: torch.Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[-1] % _LANES == 0


def _is_rows(x: torch.Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.stride(1) == 1


def _pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _threads() -> ctypes.c_int64:
    return ctypes.c_int64(torch.get_num_threads())

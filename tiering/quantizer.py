"""FP8 pages: one byte a channel, ``x = s (q + b) + mu``.

``q`` is an 8-bit float, ``s`` and ``mu`` belong to a channel (one head, one dimension; fixed by
calibration), ``b`` to a token and head (optional, found while writing). Both K and V use it, K
after RoPE. Why this form: attention can fold all of it away (``folding.py``), so kernels read
plain FP8 pages.

- ``s`` is a power of two, so that ``q s`` in bf16 is exact. A floating format loses nothing by it.
- ``mu`` is what removes error: a float's error is relative to its size, so a channel that lies far
  from zero wastes its bits on the offset.
- K may also be rounded with error feedback (``feedback.py``): each channel's error is handed on to
  channels that are still to be rounded, so that the errors cancel in the logits.
- E5M2 overflows to infinity and E4M3 to NaN or 448, depending on torch and device, so values are
  clamped here, and calibration leaves headroom for tokens that it has not seen.

Error of one value, from the formats (round to nearest even, m mantissa bits, step u below the
smallest normal number), for ``n = (x - mu) / s - b`` inside the range:

    |q - n| <= max(|n| 2^-(m+1), u / 2)        E4M3: m = 3, u = 2^-9; E5M2: m = 2, u = 2^-16

times ``s`` for ``x``, plus the rounding of float32 arithmetic (``error_bound``). With error
feedback a single channel may be further off.
"""

from dataclasses import dataclass

import torch

from sglang_ext.tiering.feedback import Feedback, round_in_turn

__all__ = [
    "E4M3",
    "E5M2",
    "FORMATS",
    "Channels",
    "Format",
    "Quantized",
    "dequantize",
    "error_bound",
    "quantize",
    "require_finite",
    "within_range",
]


@dataclass(frozen=True, slots=True)
class Format:
    """An 8-bit floating format: its name in the policy, its dtype and its precision."""

    name: str
    dtype: torch.dtype
    mantissa_bits: int
    smallest: float
    """The step between two numbers below the smallest normal one."""

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return torch.finfo(self.dtype).max


E4M3 = Format("fp8_e4m3", torch.float8_e4m3fn, mantissa_bits=3, smallest=2.0**-9)
E5M2 = Format("fp8_e5m2", torch.float8_e5m2, mantissa_bits=2, smallest=2.0**-16)
FORMATS = {format.name: format for format in (E4M3, E5M2)}

_ROUNDINGS = 4
"""Float32 operations between ``x`` and its reconstruction, each off by half a unit at most."""


@dataclass(frozen=True, slots=True)
class Channels:
    """What all tokens share in one layer's K or V: ``scale``, ``mean``, float32 [heads, dim].

    With ``feedback`` the rounding errors of channels cancel; else each is rounded by itself.
    """

    scale: torch.Tensor
    mean: torch.Tensor
    feedback: Feedback | None = None

    @classmethod
    def neutral(cls, heads: int, dim: int) -> "Channels":
        """Scale 1 and mean 0: a plain cast to FP8."""
        return cls(torch.ones(heads, dim), torch.zeros(heads, dim))

    def heads(self, heads: slice) -> "Channels":
        """Those of some heads."""
        feedback = self.feedback and self.feedback.heads(heads)
        return Channels(self.scale[heads], self.mean[heads], feedback)

    def to(self, device: torch.device | str) -> "Channels":
        """The same on ``device``."""
        feedback = self.feedback and self.feedback.to(device)
        return Channels(self.scale.to(device), self.mean.to(device), feedback)


@dataclass(frozen=True, slots=True)
class Quantized:
    """Rows of a page: ``codes`` FP8 [tokens, heads, dim], ``shift`` float32 [tokens, heads]."""

    codes: torch.Tensor
    shift: torch.Tensor | None


def quantize(
    rows: torch.Tensor, channels: Channels, format: Format, *, per_token: bool = False
) -> Quantized:
    """Quantize K or V rows [tokens, heads, dim] of any floating dtype.

    With ``per_token``, each token and head also gets the mean of its normalised channels as shift.
    What lies outside the format's range is clamped to its largest number. NaN stays NaN: whoever
    may meet it asks ``require_finite`` first, which costs a synchronisation on a GPU.
    """
    normal = (rows.float() - channels.mean) / channels.scale
    shift = normal.mean(dim=-1) if per_token else None
    if shift is not None:
        normal -= shift.unsqueeze(-1)
    if channels.feedback is not None:
        normal = round_in_turn(normal, channels.feedback, lambda x: _codes(x, format).float())
    return Quantized(_codes(normal, format), shift)


def _codes(normal: torch.Tensor, format: Format) -> torch.Tensor:
    return normal.clamp(-format.largest, format.largest).to(format.dtype)


def dequantize(quantized: Quantized, channels: Channels) -> torch.Tensor:
    """Return the rows, float32 [tokens, heads, dim], that ``quantized`` stands for."""
    normal = quantized.codes.float()
    if quantized.shift is not None:
        normal += quantized.shift.unsqueeze(-1)
    return normal * channels.scale + channels.mean


def error_bound(
    rows: torch.Tensor, quantized: Quantized, channels: Channels, format: Format
) -> torch.Tensor:
    """Return how far ``dequantize`` may lie from ``rows``, value by value (the formula above).

    A clamped value may also be off by as much as it lies outside the range. Not for channels with
    feedback.
    """
    normal = (rows.float() - channels.mean) / channels.scale
    shift = torch.zeros(1) if quantized.shift is None else quantized.shift.unsqueeze(-1)
    inner = (normal - shift).abs()
    rounding = (inner.clamp(max=format.largest) * 2.0 ** -(format.mantissa_bits + 1)).clamp(
        min=format.smallest / 2
    )
    outside = (inner - format.largest).clamp(min=0)
    size = rows.float().abs() + channels.mean.abs() + (inner + shift.abs()) * channels.scale
    arithmetic = _ROUNDINGS * torch.finfo(torch.float32).eps * size
    return (rounding + outside) * channels.scale + arithmetic


def require_finite(rows: torch.Tensor, what: str) -> None:
    """Raise ``ValueError`` naming ``what`` when ``rows`` hold NaN or infinity."""
    if not bool(torch.isfinite(rows).all()):
        raise ValueError(f"{what} holds NaN or infinity; FP8 pages cannot keep it")


def within_range(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``rows`` as pages of ``dtype`` can hold them: FP8 clamps, others are left alone.

    For a plain cast, which makes infinity or NaN of what is too large: one such number in a page
    makes NaN of every answer over it.
    """
    format = next((format for format in FORMATS.values() if format.dtype is dtype), None)
    return rows if format is None else rows.clamp(-format.largest, format.largest)

"""The file of calibrated FP8 scales: whose weights it belongs to, and each layer's channels.

A safetensors file: tensors ``layers.<n>.key.scale``, ``.key.mean``, ``.value.scale``,
``.value.mean`` (float32 [KV heads, dim], all heads of the model, before it is cut into ranks),
where there is error feedback ``.order`` and ``.spread`` (as in ``feedback.py``), and as metadata
what the file is for. A file of other weights is refused: its means would be wrong, and wrong means
are wrong answers.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from xxhash import xxh3_128

from sglang_ext.errors import ScalesError
from sglang_ext.tiering.feedback import Feedback
from sglang_ext.tiering.quantizer import FORMATS, Channels, Format

__all__ = ["LayerChannels", "Scales", "checkpoint_hash", "load_scales", "save_scales"]

_VERSION = "2"
_MADE_BY = "make one with: sglang-ext calibrate --model-path MODEL --out FILE"
_BLOCK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class LayerChannels:
    """The channels of one layer's K and V."""

    keys: Channels
    values: Channels

    def heads(self, heads: slice) -> "LayerChannels":
        """Return those of some KV heads."""
        return LayerChannels(self.keys.heads(heads), self.values.heads(heads))

    def to(self, device: torch.device | str) -> "LayerChannels":
        """Return the same on ``device``."""
        return LayerChannels(self.keys.to(device), self.values.to(device))


@dataclass(frozen=True, slots=True)
class Scales:
    """Calibrated channels by layer number; layers without attention are absent.

    ``model`` is a name for people, ``weights`` what ``checkpoint_hash`` says.
    """

    format: Format
    model: str
    weights: str
    layers: Mapping[int, LayerChannels]

    def of_rank(self, rank: int, ranks: int) -> "Scales":
        """Return what one of ``ranks`` ranks holds: its share of the heads, or one head.

        Heads are dealt out as SGLang does: in runs, and each to several ranks where there are more
        ranks than heads.
        """

        def share(layer: LayerChannels) -> LayerChannels:
            heads = layer.keys.scale.shape[0]
            first = rank * heads // ranks
            return layer.heads(slice(first, first + max(1, heads // ranks)))

        return replace(self, layers={n: share(layer) for n, layer in self.layers.items()})


def checkpoint_hash(folder: Path) -> str:
    """Return a hash of a model's configuration and of every byte of its weights.

    Reads the whole checkpoint once. Raises ``ScalesError`` for a folder without safetensors files.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ScalesError(
            f"{folder}: no *.safetensors file; give the folder of the model's weights"
        )
    digest = xxh3_128((folder / "config.json").read_bytes())
    for file in files:
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            while block := stream.read(_BLOCK_BYTES):
                digest.update(block)
    return digest.hexdigest()


def save_scales(path: Path, scales: Scales) -> None:
    """Write ``scales`` to ``path``, over what was there; raise ``ScalesError`` when that fails."""
    tensors = {
        f"layers.{number}.{which}.{part}": tensor.contiguous().clone()
        for number, layer in scales.layers.items()
        for which, channels in (("key", layer.keys), ("value", layer.values))
        for part, tensor in _parts(channels)
    }
    metadata = {
        "sglang_ext_scales": _VERSION,
        "format": scales.format.name,
        "model": scales.model,
        "weights": scales.weights,
    }
    partial = path.with_name(f".{path.name}.partial")
    try:
        save_file(tensors, partial, metadata)
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        raise ScalesError(f"{path}: could not be written: {error}") from None


def _parts(channels: Channels) -> Iterator[tuple[str, torch.Tensor]]:
    yield "scale", channels.scale
    yield "mean", channels.mean
    if channels.feedback is not None:
        yield "order", channels.feedback.order
        yield "spread", channels.feedback.spread


def load_scales(path: Path, *, weights: str | None = None, format: Format | None = None) -> Scales:
    """Read ``path``; raise ``ScalesError`` when it is unreadable or for something else.

    ``weights`` and ``format``, where given, must be the file's own.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
    except (OSError, SafetensorError) as error:
        raise ScalesError(
            f"{path}: not a readable safetensors file ({error}); {_MADE_BY}"
        ) from None
    if metadata.get("sglang_ext_scales") != _VERSION or metadata.get("format") not in FORMATS:
        raise ScalesError(f"{path}: not a file of FP8 scales that this version reads; {_MADE_BY}")
    _require(path, "weights", metadata["weights"], weights)
    _require(path, "format", metadata["format"], format.name if format else None)
    return Scales(
        FORMATS[metadata["format"]], metadata["model"], metadata["weights"], _layers(path, tensors)
    )


def _require(path: Path, what: str, found: str, expected: str | None) -> None:
    if expected is not None and found != expected:
        raise ScalesError(
            f"{path}: made for {what} {found}, but the server has {expected}; {_MADE_BY}"
        )


def _layers(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[int, LayerChannels]:
    try:
        numbers = sorted({int(name.split(".")[1]) for name in tensors})
        layers = {
            number: LayerChannels(
                _channels(tensors, f"layers.{number}.key"),
                _channels(tensors, f"layers.{number}.value"),
            )
            for number in numbers
        }
    except (KeyError, IndexError, ValueError) as error:
        raise ScalesError(
            f"{path}: a layer is incomplete or damaged ({error}); {_MADE_BY}"
        ) from None
    return layers


def _channels(tensors: Mapping[str, torch.Tensor], prefix: str) -> Channels:
    scale, mean = tensors[f"{prefix}.scale"], tensors[f"{prefix}.mean"]
    if scale.shape != mean.shape or scale.dim() != 2:
        raise ValueError(f"{prefix} has shapes {tuple(scale.shape)} and {tuple(mean.shape)}")
    mantissa, _ = torch.frexp(scale)
    if not bool((mantissa == 0.5).all() and torch.isfinite(mean).all()):
        raise ValueError(
            f"{prefix} has a scale that is no power of two, or a mean that is not finite"
        )
    return Channels(scale, mean, _feedback(tensors, prefix, scale.shape))


def _feedback(
    tensors: Mapping[str, torch.Tensor], prefix: str, shape: torch.Size
) -> Feedback | None:
    if f"{prefix}.order" not in tensors and f"{prefix}.spread" not in tensors:
        return None
    order, spread = tensors[f"{prefix}.order"], tensors[f"{prefix}.spread"]
    if order.shape != shape or spread.shape != (*shape, shape[-1]):
        raise ValueError(f"{prefix} has an order or a spread of another shape than its scale")
    every = torch.arange(shape[-1]).expand(shape)
    if not torch.equal(order.sort(dim=-1).values, every) or not bool(torch.isfinite(spread).all()):
        raise ValueError(f"{prefix} has an order that misses a channel, or a spread not finite")
    if bool(spread.tril().any()):
        raise ValueError(f"{prefix} has a spread to channels that are already rounded")
    return Feedback(order, spread)

"""``sglang-ext calibrate``: find the FP8 scales of a model, and say what FP8 pages cost in quality.

The first half of the text gives the scales, the second half (unseen) the loss of each format and
scheme: perplexity relative to bf16 pages, with a paired bootstrap interval over chunks of text.
"""

import pydoc_data.topics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedModel

from sglang_ext.calibration.treatment import Treatment, load_model, token_losses, treated
from sglang_ext.errors import ScalesError
from sglang_ext.tiering.channel_statistics import ChannelStatistics
from sglang_ext.tiering.quantizer import FORMATS, Channels, Format, dequantize, quantize
from sglang_ext.tiering.scales import LayerChannels, Scales, checkpoint_hash

__all__ = ["SCHEMES", "Loss", "Measured", "Scheme", "calibrate", "choose", "default_text"]

_CHUNK = 512
"""Tokens of text that attend to each other."""
_RESAMPLES = 2000
_WORTH = 0.05
"""Percentage points of perplexity below which the simpler scheme is as good."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """What of ``x = s (q + b) + mu`` is used: ``s``, ``mu`` for K and for V, ``b``."""

    name: str
    scaled: bool = False
    mean_of_keys: bool = False
    mean_of_values: bool = False
    per_token: bool = False


SCHEMES = (
    Scheme("plain cast"),
    Scheme("scale", scaled=True),
    Scheme("scale, mean of K", scaled=True, mean_of_keys=True),
    Scheme("scale, mean of K and V", scaled=True, mean_of_keys=True, mean_of_values=True),
    Scheme("scale, mean of K, token shift", scaled=True, mean_of_keys=True, per_token=True),
)
"""From the simplest on. All but the token shift are free for every attention kernel."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Perplexity of one format and scheme over that of bf16 pages, minus 1, in percent."""

    format: Format
    scheme: Scheme
    percent: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What a calibration found: the file's content, the losses, and each layer's relative error."""

    scales: Scales
    chosen: Loss
    tokens: int
    losses: Sequence[Loss]
    layer_errors: Mapping[int, tuple[float, float]]
    """By layer: root mean square error of K and of V over their own root mean square."""


_Statistics = dict[int, tuple[ChannelStatistics, ChannelStatistics]]


def default_text() -> str:
    """Some 700 kB of English technical text that every Python brings along: its own reference."""
    return "\n\n".join(pydoc_data.topics.topics.values())


def calibrate(model_folder: Path, text: str, *, tokens: int, format: Format | None) -> Measured:
    """Calibrate the model in ``model_folder`` on ``tokens`` tokens of ``text``, half for the test.

    Without a ``format`` the one that loses less is chosen. Raises ``ScalesError`` for a text that
    is too short.
    """
    chunks = _chunks(model_folder, text, tokens)
    model = load_model(model_folder)
    seen, unseen = chunks[: len(chunks) // 2], chunks[len(chunks) // 2 :]
    statistics = _learn(model, seen)
    losses = _losses(model, unseen, statistics)
    chosen = choose(losses, format)
    layers = _layers(statistics, chosen.format, chosen.scheme)
    return Measured(
        Scales(chosen.format, model_folder.name, checkpoint_hash(model_folder), layers),
        chosen,
        sum(len(chunk) for chunk in chunks),
        losses,
        _layer_errors(model, unseen[0], chosen.format, layers),
    )


def choose(losses: Sequence[Loss], format: Format | None) -> Loss:
    """Return the simplest scheme of those that lose least and cost attention nothing.

    Of ``format``, or of any. Differences below ``_WORTH`` do not count.
    """
    free = [
        loss
        for loss in losses
        if not loss.scheme.per_token and (format is None or loss.format is format)
    ]
    least = min(loss.percent for loss in free)
    return next(loss for loss in free if loss.percent <= least + _WORTH)


def _chunks(model_folder: Path, text: str, tokens: int) -> list[torch.Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"][:tokens])
    chunks = [chunk for chunk in ids.split(_CHUNK) if len(chunk) == _CHUNK]
    if len(chunks) < 4:
        raise ScalesError(
            f"the text has {len(ids)} tokens; calibration needs {4 * _CHUNK}, better 16,000"
        )
    return chunks


def _learn(model: PreTrainedModel, chunks: Sequence[torch.Tensor]) -> _Statistics:
    statistics: _Statistics = {}

    def watch(
        layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer not in statistics:
            statistics[layer] = (_new_statistics(keys), _new_statistics(values))
        of_keys, of_values = statistics[layer]
        of_keys.add(keys)
        of_values.add(values)
        return keys, values

    with treated(watch):
        for chunk in chunks:
            token_losses(model, chunk)
    return statistics


def _new_statistics(rows: torch.Tensor) -> ChannelStatistics:
    return ChannelStatistics(rows.shape[-2], rows.shape[-1])


def _losses(
    model: PreTrainedModel, chunks: Sequence[torch.Tensor], statistics: _Statistics
) -> list[Loss]:
    """The loss of every format and scheme over ``chunks``."""
    reference = _mean_losses(model, chunks, _as_bf16)
    losses = []
    for format in FORMATS.values():
        for scheme in SCHEMES:
            layers = _layers(statistics, format, scheme)
            treatment = _quantized(layers, format, per_token=scheme.per_token)
            difference = _mean_losses(model, chunks, treatment) - reference
            losses.append(Loss(format, scheme, *_interval(difference)))
    return losses


def _mean_losses(
    model: PreTrainedModel, chunks: Sequence[torch.Tensor], treatment: Treatment
) -> torch.Tensor:
    with treated(treatment):
        return torch.stack([token_losses(model, chunk).mean() for chunk in chunks])


def _as_bf16(
    _layer: int, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return keys.bfloat16(), values.bfloat16()


def _quantized(
    layers: Mapping[int, LayerChannels], format: Format, *, per_token: bool
) -> Treatment:
    def there_and_back(rows: torch.Tensor, channels: Channels) -> torch.Tensor:
        quantized = quantize(rows.bfloat16(), channels, format, per_token=per_token)
        return dequantize(quantized, channels)

    def treatment(
        layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        of_layer = layers[layer]
        return there_and_back(keys, of_layer.keys), there_and_back(values, of_layer.values)

    return treatment


def _layers(statistics: _Statistics, format: Format, scheme: Scheme) -> dict[int, LayerChannels]:
    return {
        number: LayerChannels(
            _channels(of_keys, format, scaled=scheme.scaled, centred=scheme.mean_of_keys),
            _channels(of_values, format, scaled=scheme.scaled, centred=scheme.mean_of_values),
        )
        for number, (of_keys, of_values) in statistics.items()
    }


def _channels(
    statistics: ChannelStatistics, format: Format, *, scaled: bool, centred: bool
) -> Channels:
    channels = statistics.channels(format, centred=centred)
    return channels if scaled else Channels.neutral(*channels.scale.shape)


def _interval(differences: torch.Tensor) -> tuple[float, float, float]:
    """Percent of perplexity for the mean difference, and its 95 % paired bootstrap interval."""
    generator = torch.Generator().manual_seed(0)
    size = len(differences)
    picks = torch.randint(size, (_RESAMPLES, size), generator=generator)
    low, high = differences[picks].mean(dim=1).quantile(torch.tensor([0.025, 0.975]))
    percent = (torch.stack([differences.mean(), low, high]).exp() - 1) * 100
    return percent[0].item(), percent[1].item(), percent[2].item()


def _layer_errors(
    model: PreTrainedModel, chunk: torch.Tensor, format: Format, layers: Mapping[int, LayerChannels]
) -> dict[int, tuple[float, float]]:
    errors: dict[int, tuple[float, float]] = {}
    quantized = _quantized(layers, format, per_token=False)

    def watch(
        layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key_error, value_error = (
            float((new - old).norm() / old.norm())
            for new, old in zip(quantized(layer, keys, values), (keys, values), strict=True)
        )
        errors[layer] = (key_error, value_error)
        return keys, values

    with treated(watch):
        token_losses(model, chunk)
    return errors

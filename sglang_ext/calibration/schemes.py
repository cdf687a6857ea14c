"""The schemes of FP8 pages that calibration compares, and each layer's channels under one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from sglang_ext.calibration.treatment import Treatment, latent_rank, logits_of, treated
from sglang_ext.tiering.channel_statistics import ChannelStatistics
from sglang_ext.tiering.feedback import QueryStatistics, learn_feedback
from sglang_ext.tiering.quantizer import Channels, Format, dequantize, quantize
from sglang_ext.tiering.scales import LayerChannels

__all__ = [
    "SCHEMES",
    "LatentStatistics",
    "LayerStatistics",
    "Scheme",
    "Statistics",
    "as_bf16",
    "layers_of",
    "learn",
    "quantized",
    "schemes_for",
]


@dataclass(frozen=True, slots=True)
class Scheme:
    """What of ``x = s (q + b) + mu`` is used, and whether K is rounded with error feedback."""

    name: str
    scaled: bool = False
    mean_of_keys: bool = False
    mean_of_values: bool = False
    feedback: bool = False
    per_token: bool = False


SCHEMES = (
    Scheme("plain cast"),
    Scheme("mean of K", scaled=True, mean_of_keys=True),
    Scheme("mean of K and V", scaled=True, mean_of_keys=True, mean_of_values=True),
    Scheme("feedback", scaled=True, feedback=True),
    Scheme("mean of K, feedback", scaled=True, mean_of_keys=True, feedback=True),
    Scheme("mean of K, token shift", scaled=True, mean_of_keys=True, per_token=True),
)
"""From the simplest on. All but the plain cast have scales; all but the token shift are free for
every kernel that reads pages."""


def schemes_for(model: PreTrainedModel) -> Sequence[Scheme]:
    """Return those that ``model`` can have.

    A latent row is K and V at once, so it has one mean; and an error that cancels in K's logits
    would be the larger in V.
    """
    if latent_rank(model) is None:
        return SCHEMES
    return [
        scheme
        for scheme in SCHEMES
        if scheme.mean_of_keys == scheme.mean_of_values and not scheme.feedback
    ]


class LayerStatistics:
    """What the calibration text showed of one layer's queries, keys and values."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.queries = QueryStatistics(*keys.shape[1:])
        self.keys = ChannelStatistics(*keys.shape[1:])
        self.values = ChannelStatistics(*values.shape[1:])

    def add(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take in rows [tokens, heads, dim]."""
        self.queries.add(queries)
        self.keys.add(keys)
        self.values.add(values)

    def channels(self, format: Format, scheme: Scheme) -> LayerChannels:
        """Return the layer's channels under ``scheme``."""
        keys = _channels(self.keys, format, scheme.scaled, scheme.mean_of_keys)
        values = _channels(self.values, format, scheme.scaled, scheme.mean_of_values)
        if scheme.feedback:
            moment, power = self.queries.second_moment(), self.keys.power(keys)
            keys = Channels(keys.scale, keys.mean, learn_feedback(moment, keys.scale, power))
        return LayerChannels(keys, values)


class LatentStatistics:
    """What the calibration text showed of one layer's latent rows, which are K and V at once.

    Their rotary tail keeps scale 1 and mean 0: its channels lie in another order in SGLang.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._rows = ChannelStatistics(*keys.shape[1:])
        self._rank = values.shape[-1]

    def add(self, _queries: torch.Tensor, keys: torch.Tensor, _values: torch.Tensor) -> None:
        """Take in rows [tokens, 1, rank + tail]."""
        self._rows.add(keys)

    def channels(self, format: Format, scheme: Scheme) -> LayerChannels:
        """Return the layer's channels under ``scheme``."""
        rows = _channels(self._rows, format, scheme.scaled, scheme.mean_of_keys)
        rows.scale[:, self._rank :], rows.mean[:, self._rank :] = 1, 0
        values = Channels(rows.scale[:, : self._rank], rows.mean[:, : self._rank])
        return LayerChannels(rows, values)


Statistics = LayerStatistics | LatentStatistics


def learn(model: PreTrainedModel, chunks: Sequence[torch.Tensor]) -> dict[int, Statistics]:
    """Run the model over ``chunks`` [tokens] and return the statistics of each layer."""
    kind = LayerStatistics if latent_rank(model) is None else LatentStatistics
    statistics: dict[int, Statistics] = {}

    def watch(
        layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer not in statistics:
            statistics[layer] = kind(keys, values)
        statistics[layer].add(queries, keys, values)
        return keys, values

    with treated(watch):
        for chunk in chunks:
            logits_of(model, chunk)
    return statistics


def layers_of(
    statistics: Mapping[int, Statistics], format: Format, scheme: Scheme
) -> dict[int, LayerChannels]:
    """Return every layer's channels under ``scheme``."""
    return {number: layer.channels(format, scheme) for number, layer in statistics.items()}


def as_bf16(
    _layer: int, _queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The treatment that bfloat16 pages are."""
    return keys.bfloat16(), values.bfloat16()


def quantized(
    layers: Mapping[int, LayerChannels], format: Format, *, per_token: bool = False
) -> Treatment:
    """Return the treatment that FP8 pages with these channels are."""

    def there_and_back(rows: torch.Tensor, channels: Channels) -> torch.Tensor:
        codes = quantize(rows.bfloat16(), channels, format, per_token=per_token)
        return dequantize(codes, channels)

    def treatment(
        layer: int, _queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        of_layer = layers[layer]
        return there_and_back(keys, of_layer.keys), there_and_back(values, of_layer.values)

    return treatment


def _channels(
    statistics: ChannelStatistics, format: Format, scaled: bool, centred: bool
) -> Channels:
    channels = statistics.channels(format, centred=centred)
    return channels if scaled else Channels.neutral(*channels.scale.shape)

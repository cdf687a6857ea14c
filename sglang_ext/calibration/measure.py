"""``sglang-ext calibrate``: find the FP8 scales of a model, and say what FP8 pages cost in quality.

The first half of the text gives the scales, the second half (unseen) the loss of each format and
scheme: perplexity relative to bf16 pages, with a paired bootstrap interval over chunks of text, and
how far the predictions move. The choice follows the latter: on a few thousand tokens it is hundreds
of times less noisy, since it asks for no luck with the very tokens that the text goes on with.
"""

import pydoc_data.topics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedModel

from sglang_ext.calibration.judge import Judged, judge, loss_interval
from sglang_ext.calibration.schemes import (
    Scheme,
    Statistics,
    as_bf16,
    layers_of,
    learn,
    quantized,
    schemes_for,
)
from sglang_ext.calibration.treatment import load_model, logits_of, treated
from sglang_ext.errors import ScalesError
from sglang_ext.tiering.quantizer import FORMATS, Format
from sglang_ext.tiering.scales import LayerChannels, Scales, checkpoint_hash

__all__ = ["Loss", "Measured", "calibrate", "choose", "default_text", "split_text"]

_CHUNK = 512
"""Tokens of text that attend to each other."""
_WORTH = 1.1
"""How many times the least divergence a simpler scheme may have and still be as good."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What one format and scheme costs against bf16 pages.

    ``percent``: perplexity over theirs, minus 1, and its 95 % interval. ``divergence``: mean
    Kullback-Leibler divergence of the predictions from theirs, nats a token.
    """

    format: Format
    scheme: Scheme
    percent: float
    low: float
    high: float
    divergence: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What a calibration found: the file's content, the losses, and each layer's relative error."""

    scales: Scales
    chosen: Loss
    tokens: int
    losses: Sequence[Loss]
    layer_errors: Mapping[int, tuple[float, float]]
    """By layer: root mean square error of K and of V over their own root mean square."""


def default_text() -> str:
    """Some 700 kB of English technical text that every Python brings along: its own reference."""
    return "\n\n".join(pydoc_data.topics.topics.values())


def calibrate(model_folder: Path, text: str, *, tokens: int, format: Format | None) -> Measured:
    """Calibrate the model in ``model_folder`` on ``tokens`` tokens of ``text``, half for the test.

    Without a ``format`` the one that loses less is chosen. Raises ``ScalesError`` for a text that
    is too short.
    """
    chunks = split_text(model_folder, text, tokens)
    model = load_model(model_folder)
    seen, unseen = chunks[: len(chunks) // 2], chunks[len(chunks) // 2 :]
    statistics = learn(model, seen)
    losses = _losses(model, unseen, statistics)
    chosen = choose(losses, format)
    layers = layers_of(statistics, chosen.format, chosen.scheme)
    return Measured(
        Scales(chosen.format, model_folder.name, checkpoint_hash(model_folder), layers),
        chosen,
        sum(len(chunk) for chunk in chunks),
        losses,
        _layer_errors(model, unseen[0], chosen.format, layers),
    )


def choose(losses: Sequence[Loss], format: Format | None) -> Loss:
    """Return the simplest scheme of those that move predictions least and cost attention nothing.

    Of ``format``, or of any. Divergences within ``_WORTH`` of the least are equal.
    """
    free = [
        loss
        for loss in losses
        if not loss.scheme.per_token and (format is None or loss.format is format)
    ]
    least = min(loss.divergence for loss in free)
    return next(loss for loss in free if loss.divergence <= least * _WORTH)


def split_text(model_folder: Path, text: str, tokens: int) -> list[torch.Tensor]:
    """Return the first ``tokens`` tokens of ``text`` in chunks; raise ScalesError for too few."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"][:tokens])
    chunks = [chunk for chunk in ids.split(_CHUNK) if len(chunk) == _CHUNK]
    if len(chunks) < 4:
        raise ScalesError(
            f"the text has {len(ids)} tokens; calibration needs {4 * _CHUNK}, better 8,000"
        )
    return chunks


def _losses(
    model: PreTrainedModel,
    chunks: Sequence[torch.Tensor],
    statistics: Mapping[int, Statistics],
) -> list[Loss]:
    """The loss of every format and scheme over ``chunks``."""
    pairs = [(format, scheme) for format in FORMATS.values() for scheme in schemes_for(model)]
    treatments = [
        quantized(layers_of(statistics, format, scheme), format, per_token=scheme.per_token)
        for format, scheme in pairs
    ]
    reference, *others = zip(
        *(judge(model, chunk, [as_bf16, *treatments]) for chunk in chunks), strict=True
    )
    return [
        _loss(format, scheme, reference, judged)
        for (format, scheme), judged in zip(pairs, others, strict=True)
    ]


def _loss(
    format: Format, scheme: Scheme, reference: Sequence[Judged], judged: Sequence[Judged]
) -> Loss:
    pairs = zip(judged, reference, strict=True)
    differences = torch.stack([(ours.loss - theirs.loss).mean() for ours, theirs in pairs])
    divergence = torch.cat([chunk.divergence for chunk in judged]).mean().item()
    return Loss(format, scheme, *loss_interval(differences), divergence)


def _layer_errors(
    model: PreTrainedModel, chunk: torch.Tensor, format: Format, layers: Mapping[int, LayerChannels]
) -> dict[int, tuple[float, float]]:
    errors: dict[int, tuple[float, float]] = {}
    treatment = quantized(layers, format)

    def watch(
        layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key_error, value_error = (
            float((new - old).norm() / old.norm())
            for new, old in zip(
                treatment(layer, queries, keys, values), (keys, values), strict=True
            )
        )
        errors[layer] = (key_error, value_error)
        return keys, values

    with treated(watch):
        logits_of(model, chunk)
    return errors

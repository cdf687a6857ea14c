"""What a treatment of K and V does to a model's predictions, token by token and in sum."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from sglang_ext.calibration.treatment import Treatment, logits_of, treated

__all__ = ["Judged", "judge", "loss_interval"]

_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Judged:
    """A chunk's predictions of its tokens but the first; all float32 [tokens - 1].

    ``loss``: negative log-likelihood, nats. ``divergence``: Kullback-Leibler, nats, from the
    reference's distribution. ``agrees``: 1 where the most likely token is the reference's.
    """

    loss: torch.Tensor
    divergence: torch.Tensor
    agrees: torch.Tensor


def judge(
    model: PreTrainedModel, chunk: torch.Tensor, treatments: Sequence[Treatment]
) -> list[Judged]:
    """Judge each of ``treatments`` over ``chunk`` [tokens] against the first, the reference."""
    expected = _log_probabilities(model, chunk, treatments[0])
    others = (_log_probabilities(model, chunk, treatment) for treatment in treatments[1:])
    return [_compare(expected, found, chunk) for found in (expected, *others)]


def _log_probabilities(
    model: PreTrainedModel, chunk: torch.Tensor, treatment: Treatment
) -> torch.Tensor:
    with treated(treatment):
        return logits_of(model, chunk)[:-1].log_softmax(dim=-1)


def _compare(expected: torch.Tensor, found: torch.Tensor, chunk: torch.Tensor) -> Judged:
    loss = -found.gather(-1, chunk[1:].unsqueeze(-1)).squeeze(-1)
    divergence = torch.nn.functional.kl_div(found, expected, reduction="none", log_target=True)
    agrees = found.argmax(dim=-1) == expected.argmax(dim=-1)
    return Judged(loss, divergence.sum(dim=-1), agrees.float())


def loss_interval(differences: torch.Tensor) -> tuple[float, float, float]:
    """Return what ``differences`` of mean loss, nats [chunks], are in percent of perplexity.

    The mean, and the 95 % interval of a bootstrap over chunks.
    """
    generator = torch.Generator().manual_seed(0)
    size = len(differences)
    picks = torch.randint(size, (_RESAMPLES, size), generator=generator)
    low, high = differences[picks].mean(dim=1).quantile(torch.tensor([0.025, 0.975]))
    percent = (torch.stack([differences.mean(), low, high]).exp() - 1) * 100
    return percent[0].item(), percent[1].item(), percent[2].item()

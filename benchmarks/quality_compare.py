"""Kinds of pages against a baseline, over the same texts: what they lose, and how surely."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

__all__ = ["Comparison", "percent"]

_RESAMPLES = 4_000
_INTERVAL = torch.tensor([0.025, 0.975], dtype=torch.float64)


class Text(Protocol):
    """What was read: its suite, and of each token whether it belongs to an answer."""

    suite: str
    answer: list[bool]


class Comparison:
    """What each kind of page made of the passages, against bf16 pages."""

    def __init__(
        self, texts: Sequence[Text], raw: Mapping[str, Mapping[str, Any]], baseline: str
    ) -> None:
        """``raw``: by kind, for each text under ``passages`` its tokens' ``loss`` and ``best``."""
        self.names = [name for name in raw if name != baseline]
        self.texts, self._raw, self._baseline = texts, raw, baseline
        generator = torch.Generator().manual_seed(0)
        self._picks = torch.randint(len(texts), (_RESAMPLES, len(texts)), generator=generator)

    def loss(self, name: str, suite: str | None, *, answers: bool = False) -> dict[str, float]:
        """Return the loss of perplexity in percent, and its 95 % interval."""
        lost, counts = self._lost(name, suite, answers=answers)
        picked = lost[self._picks].sum(1) / counts[self._picks].sum(1)
        low, high = picked[picked.isfinite()].quantile(_INTERVAL).tolist()
        return {
            "percent": percent((lost.sum() / counts.sum()).item()),
            "low": percent(low),
            "high": percent(high),
        }

    def ratio(self, name: str, other: str, suite: str | None = None) -> dict[str, float]:
        """Return the loss of ``name`` over that of ``other``, and its 95 % interval."""
        (ours, _), (theirs, _) = (self._lost(each, suite) for each in (name, other))
        picked = ours[self._picks].sum(1) / theirs[self._picks].sum(1)
        low, high = picked[picked.isfinite()].quantile(_INTERVAL).tolist()
        return {"ratio": (ours.sum() / theirs.sum()).item(), "low": low, "high": high}

    def agreement(self, name: str) -> float:
        """Return the share of tokens after which both expect the same next one."""
        pairs = [
            (ours == theirs)
            for seen, reference in self._pairs(name)
            for ours, theirs in zip(seen["best"], reference["best"], strict=True)
        ]
        return sum(pairs) / len(pairs)

    def _lost(
        self, name: str, suite: str | None, *, answers: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Nats lost and tokens counted of each passage; zero for those of other suites."""
        lost, counts = [], []
        for passage, (seen, reference) in zip(self.texts, self._pairs(name), strict=True):
            counted = torch.tensor(passage.answer[1:]) | (not answers)
            counted &= suite in (None, passage.suite)
            away = torch.tensor(seen["loss"]) - torch.tensor(reference["loss"])
            lost.append(away[counted].double().sum())
            counts.append(counted.sum())
        return torch.stack(lost), torch.stack(counts)

    def _pairs(self, name: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        both = self._raw[name]["passages"], self._raw[self._baseline]["passages"]
        return list(zip(*both, strict=True))


def percent(nats: float) -> float:
    """Return what a loss of so many nats a token is in percent of perplexity."""
    return 100 * math.expm1(nats)

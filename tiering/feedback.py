"""Rounding K so that the errors of a head's channels cancel in the logits.

A logit is ``q . k``, so what counts of a key's rounding errors ``d`` is ``q . d``, whose mean
square is ``d' M d`` with ``M`` the second moment of the queries that read this head. Channels of
queries are correlated. So channels are rounded one after another, and each hands its error on to
those that are still to come, in the shares that let them make up for most of it: ``M_RR^-1 M_Ri``
for channel ``i`` and the rest ``R``, the least-squares regression of query channel ``i`` on theirs.
(The idea is that of GPTQ, arXiv 2210.17323, which does this to weights.)

Codes stay plain FP8: who reads the pages does not know. The cost is all in writing, ``dim^2 / 2``
multiplications a token and head. Everything here is in the normalised domain of ``quantizer.py``.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["Feedback", "QueryStatistics", "learn_feedback", "round_in_turn"]

_DAMPING = 0.01
"""Share of the mean variance added to each channel's own, so that no share grows without bound."""


@dataclass(frozen=True, slots=True)
class Feedback:
    """In which order a head's channels are rounded, and what each hands on.

    ``order``: int64 [heads, dim], channel numbers. ``spread``: float32 [heads, dim, dim], above the
    diagonal only: the share of the error of the i-th in turn that the j-th gets.
    """

    order: torch.Tensor
    spread: torch.Tensor

    def heads(self, heads: slice) -> "Feedback":
        """Those of some heads."""
        return Feedback(self.order[heads], self.spread[heads])

    def to(self, device: torch.device | str) -> "Feedback":
        """The same on ``device``."""
        return Feedback(self.order.to(device), self.spread.to(device))


class QueryStatistics:
    """Running second moment of the queries that read each KV head, over any number of tokens."""

    def __init__(self, kv_heads: int, dim: int) -> None:
        self._rows = 0
        self._sum = torch.zeros(kv_heads, dim, dim, dtype=torch.float64)

    def add(self, queries: torch.Tensor) -> None:
        """Take in queries [tokens, query heads, dim], after RoPE."""
        kv_heads, dim, _ = self._sum.shape
        by_head = (
            queries.float().unflatten(1, (kv_heads, -1)).transpose(0, 1).reshape(kv_heads, -1, dim)
        )
        self._rows += by_head.shape[1]
        self._sum += (by_head.transpose(1, 2) @ by_head).double()

    def second_moment(self) -> torch.Tensor:
        """Return float64 [KV heads, dim, dim]."""
        return self._sum / max(1, self._rows)


def learn_feedback(
    second_moment: torch.Tensor, scale: torch.Tensor, power: torch.Tensor
) -> Feedback:
    """Return how to round K with channel scales ``scale`` [heads, dim].

    ``second_moment``: of the queries, [heads, dim, dim]; ``power``: each channel's mean square in
    the normalised domain, [heads, dim], which says whose errors are large: those come first.
    """
    weights = second_moment.double() * scale.double().unsqueeze(-1) * scale.double().unsqueeze(-2)
    own = weights.diagonal(dim1=-2, dim2=-1)
    floor = (_DAMPING * own.mean(dim=-1, keepdim=True)).clamp(min=torch.finfo(torch.float32).tiny)
    weights = weights + torch.diag_embed(floor.expand_as(own))
    order = (own * power.double()).argsort(dim=-1, descending=True)
    rows = order.unsqueeze(-1).expand_as(weights)
    in_turn = weights.gather(-2, rows).gather(-1, rows.transpose(-2, -1))
    return Feedback(order, _regressions(in_turn).float())


def _regressions(moment: torch.Tensor) -> torch.Tensor:
    """Return row by row the regression of each variable on those after it; zero elsewhere.

    From ``moment = U D U'`` with U upper triangular and its diagonal 1: ``U^-1 q`` is what of each
    variable those after it do not explain.
    """
    lower = torch.linalg.cholesky(moment.flip(-2, -1))
    upper = (lower / lower.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)).flip(-2, -1)
    one = torch.eye(moment.shape[-1], dtype=moment.dtype)
    return one - torch.linalg.solve_triangular(upper, one.expand_as(upper), upper=True)


def round_in_turn(
    normal: torch.Tensor, feedback: Feedback, rounded: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Round ``normal``, float32 [tokens, heads, dim], by ``rounded``, each channel after another.

    The slow, plain form: some operators a channel.
    """
    turns = feedback.order.expand(normal.shape)
    wanted = normal.gather(-1, turns)
    errors, done = torch.zeros_like(wanted), torch.empty_like(wanted)
    for turn in range(wanted.shape[-1]):
        handed = (errors[..., :turn] * feedback.spread[:, :turn, turn]).sum(dim=-1)
        value = wanted[..., turn] + handed
        done[..., turn] = rounded(value)
        errors[..., turn] = value - done[..., turn]
    return torch.empty_like(done).scatter_(-1, turns, done)

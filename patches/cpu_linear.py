"""Linear layers on a CPU: for each shape the way of computing it that is fastest on this machine.

Three ways compete at start: torch's own bfloat16 product, the same on weights that oneDNN has
reordered once, and float32. Which one wins depends on the number of rows, so each shape has one for
few rows and one for many. Reordered and widened weights are copies; together they stay within a
quarter of the memory that is free at start, and a layer beyond that keeps torch's own way.

SGLang calls ``restore_weights_before_loading`` ahead of every update of the weights and
``process_weights_after_loading`` after it: copies are dropped at the one, made again at the other.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)
from torch.nn.functional import linear

__all__ = ["Linears", "choose_ways", "speed_up_linears"]

logger = logging.getLogger(__name__)

FEW_ROWS = 32
"""Up to so many rows a product is a matter of reading the weights; above, of computing."""

_FEW_TRIED, _MANY_TRIED = (1, 4, 16), (64, 256)
_ROUNDS = 8
_FAR_BEHIND = 2
_USUAL, _CLEAR_LEAD = "packed", 1.25
_SHARE_OF_FREE_MEMORY = 0.25

Weight = torch.Tensor
Product = Callable[[torch.Tensor, Weight, torch.Tensor | None], torch.Tensor]


def _packed(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


def _widened(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    wide = None if bias is None else bias.float()
    return linear(x.float(), weight, wide).to(x.dtype)


@dataclass(frozen=True)
class Way:
    """One way to compute a linear layer: how its weights are prepared, and the product."""

    prepare: Callable[[Weight], Weight]
    product: Product
    copy_bytes: int
    """Bytes of the prepared copy for each of the two bytes of a weight."""


def _same(weight: Weight) -> Weight:
    return weight


WAYS = {
    "plain": Way(_same, linear, 0),
    "packed": Way(lambda weight: torch.ops.mkldnn._reorder_linear_weight(weight), _packed, 1),
    "float32": Way(lambda weight: weight.float(), _widened, 2),
}


@dataclass(frozen=True)
class Choice:
    """The way for few rows and the way for many."""

    few: str
    many: str

    def extra_bytes(self, weight: Weight) -> int:
        """Return the size of the copies that this choice needs."""
        return sum(WAYS[name].copy_bytes * weight.nbytes for name in {self.few, self.many})


PLAIN = Choice("plain", "plain")


@dataclass
class Linears:
    """What the layers of one model share: the choice for each shape, and the memory for copies."""

    budget: int
    choices: dict[tuple[int, ...], Choice] = field(default_factory=dict)
    used: int = 0
    left_plain: int = 0

    def take(self, weight: Weight) -> Choice:
        """Return the choice for ``weight``, counted; plain where its copies would not fit."""
        shape = tuple(weight.shape)
        if shape not in self.choices:
            self.choices[shape] = choose_ways(weight)
        choice = self.choices[shape]
        if self.used + choice.extra_bytes(weight) > self.budget:
            self.left_plain += 1
            return PLAIN
        self.used += choice.extra_bytes(weight)
        return choice


def choose_ways(weight: Weight) -> Choice:
    """Time each way on ``weight``, a bfloat16 matrix; takes some tens of milliseconds."""
    prepared = {name: way.prepare(weight) for name, way in WAYS.items()}
    return Choice(*(_winner(counts, weight, prepared) for counts in (_FEW_TRIED, _MANY_TRIED)))


def _winner(row_counts: Sequence[int], weight: Weight, prepared: dict[str, Weight]) -> str:
    """Return the usual way, unless another one wins clearly at every number of rows.

    A small lead, or a single one, may be another program's doing: every start would choose anew.
    """
    leads = dict.fromkeys(WAYS, float("inf"))
    for rows in row_counts:
        x = torch.zeros(rows, weight.shape[1], dtype=weight.dtype)
        seconds = _race(x, prepared)
        for name in WAYS:
            leads[name] = min(leads[name], seconds[_USUAL] / seconds[name])
    winner = max(leads, key=leads.__getitem__)
    return winner if leads[winner] > _CLEAR_LEAD else _USUAL


def _race(x: torch.Tensor, prepared: dict[str, Weight]) -> dict[str, float]:
    """Return the least seconds of each way; they take turns, as other programs run beside us."""
    times = dict.fromkeys(prepared, float("inf"))
    for _ in range(_ROUNDS):
        # One that is far behind is not asked again, so that the race stays short.
        bound = _FAR_BEHIND * min(times.values())
        for name in [name for name, seconds in times.items() if seconds <= bound]:
            start = time.perf_counter()
            WAYS[name].product(x, prepared[name], None)
            times[name] = min(times[name], time.perf_counter() - start)
    return times


class _PreparedMethod:
    """What both methods below do in place of SGLang's; without copies, the same as SGLang's."""

    def __init__(self, linears: Linears) -> None:
        self._linears = linears
        self._choice: Choice | None = None
        self._few: tuple[Product, Weight] | None = None
        self._many: tuple[Product, Weight] | None = None

    def restore_weights_before_loading(self, layer: Any) -> None:
        """Drop the copies ahead of an update."""
        self._few = self._many = None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Make the copies from the weights as they are now."""
        self._few = self._many = None
        if self._choice is None:
            self._choice = self._linears.take(layer.weight)
        names = {self._choice.few, self._choice.many}
        copies = {name: WAYS[name].prepare(layer.weight.detach()) for name in names}
        self._few = WAYS[self._choice.few].product, copies[self._choice.few]
        self._many = WAYS[self._choice.many].product, copies[self._choice.many]

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``x @ weight.T + bias``."""
        rows = x.shape[0] if x.dim() == 2 else x.numel() // x.shape[-1]
        way = self._few if rows <= FEW_ROWS else self._many
        if way is None or x.dtype != torch.bfloat16 or rows == 0:
            return linear(x, layer.weight, bias)
        product, copy = way
        return product(x, copy, bias)


class PreparedLinearMethod(_PreparedMethod, UnquantizedLinearMethod):
    """SGLang's linear method of one layer, computed by our choice."""


class PreparedHeadMethod(_PreparedMethod, UnquantizedEmbeddingMethod):
    """The same for the output head, whose weights may also be the embedding's."""


def speed_up_linears(model: torch.nn.Module) -> Linears:
    """Give every unquantized bfloat16 layer of ``model``, and its head, our method; log it."""
    start = time.perf_counter()
    linears = Linears(int(psutil.virtual_memory().available * _SHARE_OF_FREE_MEMORY))
    count = 0
    for module in model.modules():
        method = _method(module, getattr(model, "lm_head", None), linears)
        if method is not None:
            module.quant_method = method
            method.process_weights_after_loading(module)
            count += 1
    ways = {f"{o}x{i}": f"{c.few}/{c.many}" for (o, i), c in linears.choices.items()}
    logger.info(
        "%d linear layers prepared in %.1f s, %.0f MB of copies (at most %.0f), %d left plain; "
        "for up to %d rows / more: %s",
        count,
        time.perf_counter() - start,
        linears.used / 1e6,
        linears.budget / 1e6,
        linears.left_plain,
        FEW_ROWS,
        ways,
    )
    return linears


def _method(module: torch.nn.Module, head: Any, linears: Linears) -> Any:
    own = type(getattr(module, "quant_method", None))
    weight = getattr(module, "weight", None)
    if weight is None or weight.dim() != 2 or weight.dtype != torch.bfloat16:
        return None
    if own is UnquantizedLinearMethod:
        return PreparedLinearMethod(linears)
    if own is UnquantizedEmbeddingMethod and module is head:
        return PreparedHeadMethod(linears)
    return None

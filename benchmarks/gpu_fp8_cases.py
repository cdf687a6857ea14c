"""Batches of FP8 pages and the float32 answers that every kernel has to give; no SGLang, no GPU."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sglang_ext.tiering.channel_statistics import ChannelStatistics
from sglang_ext.tiering.feedback import QueryStatistics, learn_feedback
from sglang_ext.tiering.folding import Folding
from sglang_ext.tiering.page_plan import PagePlan, plan_pages
from sglang_ext.tiering.quantizer import (
    E4M3,
    E5M2,
    Channels,
    Format,
    Quantized,
    dequantize,
    quantize,
)

__all__ = ["CASES", "PAGE", "SCALE", "Case", "Pages", "error", "folded_in_torch", "merged_in_torch"]

PAGE = 16
SCALE = 0.08
"""Of the logits; what matters is that a softmax neither picks one key nor averages all."""


@dataclass(frozen=True)
class Case:
    """One batch: what is stored, and of each request its tokens in all and its new rows."""

    name: str
    format: Format
    query_heads: int
    kv_heads: int
    dim: int
    lengths: tuple[int, ...]
    new_rows: tuple[int, ...]
    rank: int = 0
    """Of latent rows: how many channels are the value. 0: keys and values of their own."""
    feedback: bool = False
    merged: bool = False
    """Whether the new rows are read as they are, and only those before them from pages."""

    @property
    def decodes(self) -> bool:
        """Whether every request has one new row."""
        return set(self.new_rows) == {1}


_LENGTHS, _NEW = (1, 16, 17, 700, 2_000), (1, 16, 5, 300, 64)
_GQA, _MLA = (32, 8, 128), (16, 1, 512 + 64)
CASES = [
    Case("GQA 128, E4M3, decode", E4M3, *_GQA, _LENGTHS, (1,) * 5),
    Case("GQA 128, E4M3, prefill on hits", E4M3, *_GQA, _LENGTHS, _NEW),
    Case("GQA 128, E4M3 with feedback, decode", E4M3, *_GQA, _LENGTHS, (1,) * 5, feedback=True),
    Case("GQA 128, E5M2, decode", E5M2, *_GQA, _LENGTHS, (1,) * 5),
    Case("GQA 128, E5M2, prefill on hits", E5M2, *_GQA, _LENGTHS, _NEW),
    Case("MLA 512 + 64, E4M3, decode", E4M3, *_MLA, _LENGTHS, (1,) * 5, rank=512),
    Case("MLA 512 + 64, E4M3, prefill on hits", E4M3, *_MLA, _LENGTHS, _NEW, rank=512),
    Case("MLA 512 + 64, E5M2, decode", E5M2, *_MLA, _LENGTHS, (1,) * 5, rank=512),
    Case("GQA 128, E4M3, merged", E4M3, *_GQA, (48, 700, 2_000), (5, 300, 64), merged=True),
]


class Pages:
    """A case on a device: texts in scattered pages, queries of the new rows, what to answer."""

    def __init__(self, case: Case, device: str, seed: int) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(seed)
        self.new_rows, self.lengths = torch.tensor(case.new_rows), torch.tensor(case.lengths)
        pages = (self.lengths + PAGE - 1) // PAGE
        self.slots = int(pages.sum() + 1) * PAGE
        order = 1 + torch.randperm(int(pages.sum()), generator=generator)
        table = torch.zeros(len(pages), int(pages.max()) * PAGE, dtype=torch.int32)
        for line, own in enumerate(order.split(pages.tolist())):
            slots = own.unsqueeze(1) * PAGE + torch.arange(PAGE)
            table[line, : slots.numel()] = slots.flatten().int()
        self.table = table.to(device)
        self.query = _rows(sum(case.new_rows), case.query_heads, case.dim, generator).to(device)
        keys, values = (
            _rows(self.slots, case.kv_heads, case.dim, generator).to(device) for _ in range(2)
        )
        self.raw_keys, self.raw_values = keys, keys[..., : case.rank] if case.rank else values
        self.of_keys, self.of_values = self._channels(device)
        self.folding = Folding(self.of_keys, self.of_values, case.query_heads)
        self.keys = quantize(self.raw_keys, self.of_keys, case.format).codes
        self.values = (
            self.keys[..., : case.rank]
            if case.rank
            else quantize(self.raw_values, self.of_values, case.format).codes
        )

    def plan(self, lengths: torch.Tensor | None = None) -> PagePlan:
        """Return the pages of all requests, or of so many of their first tokens."""
        lines = torch.arange(len(self.lengths), device=self.table.device)
        return plan_pages(self.table, lines, self.lengths if lengths is None else lengths, PAGE)

    def expected(self) -> torch.Tensor:
        """Return float32 attention of the new rows over what the pages stand for."""
        keys = dequantize(Quantized(self.keys, None), self.of_keys)
        values = dequantize(Quantized(self.values, None), self.of_values)
        answers = []
        for rows, slots in self.requests():
            k, v, new = keys[slots], values[slots], rows.stop - rows.start
            if self.case.merged:
                k[-new:], v[-new:] = self.raw_keys[slots[-new:]], self.raw_values[slots[-new:]]
            answers.append(_attend(self.query[rows], k, v)[0])
        return torch.cat(answers)

    def requests(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield of each request its new rows and its slots."""
        begin = 0
        for line, (new, length) in enumerate(
            zip(self.case.new_rows, self.case.lengths, strict=True)
        ):
            yield slice(begin, begin + new), self.table[line, :length].long()
            begin += new

    def _channels(self, device: str) -> tuple[Channels, Channels]:
        case = self.case
        keys = _learned(self.raw_keys.cpu(), case.format)
        if case.rank:
            values = Channels(keys.scale[:, : case.rank], keys.mean[:, : case.rank])
        else:
            values = _learned(self.raw_values.cpu(), case.format)
        if case.feedback:
            queries = QueryStatistics(case.kv_heads, case.dim)
            queries.add(self.query.cpu())
            power = torch.ones(case.kv_heads, case.dim)
            feedback = learn_feedback(queries.second_moment(), keys.scale, power)
            keys = Channels(keys.scale, keys.mean, feedback)
        return keys.to(device), values.to(device)


def folded_in_torch(pages: Pages) -> torch.Tensor:
    """What a kernel does, in float32: attend codes through the page plan, folded before and after.

    It checks the cases themselves where there is no GPU.
    """
    answers = []
    for (rows, _), slots in zip(pages.requests(), _slots(pages.plan()), strict=True):
        query = pages.folding.query(pages.query[rows])
        folded, _ = _attend(query, pages.keys[slots], pages.values[slots])
        answers.append(pages.folding.output(folded))
    return torch.cat(answers)


def merged_in_torch(pages: Pages) -> torch.Tensor:
    """The same over cached pages, merged with a state over the new rows as they are."""
    answers, cached = [], pages.plan(pages.lengths - pages.new_rows)
    for (rows, own), slots in zip(pages.requests(), _slots(cached), strict=True):
        query, new = pages.query[rows], own[-(rows.stop - rows.start) :]
        folded, lse = _attend(
            pages.folding.query(query), pages.keys[slots], pages.values[slots], causal=False
        )
        state = pages.folding.output(folded), pages.folding.log2_sum_exp(lse, query, SCALE)
        raw, raw_lse = _attend(query, pages.raw_keys[new], pages.raw_values[new])
        shares = torch.stack([state[1], raw_lse]).mul(math.log(2)).softmax(dim=0).unsqueeze(-1)
        answers.append(shares[0] * state[0] + shares[1] * raw)
    return torch.cat(answers)


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, causal: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend one request's rows, its last where ``causal``; also the log-sum-exp, base 2."""
    rows, length = len(query), len(keys)
    group = query.shape[1] // keys.shape[1]
    k, v = (each.float().repeat_interleave(group, dim=1) for each in (keys, values))
    logits = torch.einsum("qhd,thd->hqt", query.float(), k) * SCALE
    if causal:
        at = torch.arange(length, device=query.device)
        logits = logits.masked_fill(at > at[length - rows :].unsqueeze(1), -torch.inf)
    output = torch.einsum("hqt,thd->qhd", logits.softmax(dim=-1), v)
    return output, logits.logsumexp(dim=-1).T / math.log(2)


def _slots(plan: PagePlan) -> Iterator[torch.Tensor]:
    """Yield the slots of each request that a plan names."""
    for request, length in enumerate(plan.lengths.tolist()):
        own = plan.indices[plan.indptr[request] : plan.indptr[request + 1]].long()
        inside = torch.arange(PAGE, device=own.device)
        yield (own.unsqueeze(1) * PAGE + inside).flatten()[:length]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the root mean square of the error over that of the answer."""
    return float((found.float() - expected).norm() / expected.norm())


def _rows(tokens: int, heads: int, dim: int, generator: torch.Generator) -> torch.Tensor:
    """Rows with an offset of their own in every channel, as keys have it, in bfloat16."""
    offset = torch.randn(heads, dim, generator=generator)
    return (torch.randn(tokens, heads, dim, generator=generator) + offset).bfloat16()


def _learned(rows: torch.Tensor, format: Format) -> Channels:
    statistics = ChannelStatistics(*rows.shape[1:])
    statistics.add(rows)
    return statistics.channels(format)

"""What one forward pass reads from the KV pool, worked out once a step and not once a layer.

Layers differ only in their *reach*: how far back they look and which pool holds their pages. Each
reach is laid out when the first layer asks for it; the other layers find it there.

    keys of one request      [ first_key ......... cached | new rows ........ )
    their place in the pool  slots, through the request's line of the page table
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch

__all__ = [
    "QUERY_BLOCK",
    "CausalBand",
    "DecodeGroup",
    "ExtendPlan",
    "ExtendRun",
    "Reach",
    "RunList",
    "SlotList",
    "Slots",
    "Step",
    "group_by_length",
]

QUERY_BLOCK = 256
"""Query rows attended at once: keeps the causal half of the work and the mask's memory small."""

_GROUP_KEYS = 32_768
"""Most keys gathered for one decode group, so that a large batch does not need a second pool."""

Translate = Callable[[torch.Tensor], torch.Tensor]


class Reach(NamedTuple):
    """Which keys a layer reads: the ``window`` before each token (-1: all), and from which pool."""

    window: int
    sliding_pool: bool


class Slots:
    """Pool slots of some keys, int64 ``[..., keys]``, and the rows that hold their heads."""

    def __init__(self, slots: torch.Tensor) -> None:
        self.slots = slots
        self._rows: dict[int, torch.Tensor] = {}

    def rows(self, heads: int) -> torch.Tensor:
        """Return int64 ``[..., heads, keys]``: rows of a buffer seen as ``[slots * heads, -1]``."""
        if heads not in self._rows:
            head = torch.arange(heads).unsqueeze(1)
            self._rows[heads] = self.slots.unsqueeze(-2) * heads + head
        return self._rows[heads]


@dataclass(frozen=True)
class DecodeGroup:
    """Requests of like length that decode together.

    ``requests``: int64 ``[n]``, their rows in the batch. ``slots``: ``[n, longest]``, a short one
    filled up with its last slot. ``bias``: float32 ``[n, 1, longest]``, -inf on what was filled up.
    """

    requests: torch.Tensor
    slots: Slots
    bias: torch.Tensor


@dataclass(frozen=True)
class SlotList:
    """The slots of a whole decode batch, request by request, with nothing filled up.

    ``slots``: int32, those of request i in ``[starts[i], starts[i + 1])``. ``starts``: int64.
    """

    slots: torch.Tensor
    starts: torch.Tensor


@dataclass(frozen=True)
class RunList:
    """The runs of a whole extend batch, for a kernel that walks pages.

    ``slots``: int32, the slots of all runs, one run after the other. ``runs``: int64 ``[n, 4]``, of
    each run its first row, the row after its last, the keys before, and where its slots start.
    """

    slots: torch.Tensor
    runs: torch.Tensor


@dataclass(frozen=True)
class ExtendRun:
    """One request's new rows ``[begin, end)`` of the batch, and the keys that they may see.

    ``before`` keys precede the first new row, ``slots`` holds those and then the new ones.
    ``plain`` says that every row sees all keys up to its own, with nothing cached before.
    """

    begin: int
    end: int
    before: int
    slots: Slots
    plain: bool


class CausalBand:
    """The additive mask of every block of query rows, as slices of one band.

    Whether a row sees a key depends only on how far apart they are, so one matrix of ``rows`` rows
    and ``back + rows`` columns serves all blocks of all requests.
    """

    def __init__(self, *, back: int, rows: int, window: int, dtype: torch.dtype) -> None:
        distance = back + torch.arange(rows).unsqueeze(1) - torch.arange(back + rows)
        seen = distance >= 0
        if window >= 0:
            seen &= distance <= window
        self._back = back
        self._band = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))

    def block(self, position: int, rows: int, first_key: int) -> torch.Tensor:
        """Return ``[rows, keys]``: rows from ``position`` on, keys from ``first_key`` to theirs."""
        start = self._back - (position - first_key)
        return self._band[:rows, start : self._back + rows]


@dataclass(frozen=True)
class ExtendPlan:
    """The requests of one extend step under one reach."""

    runs: Sequence[ExtendRun]
    window: int
    dtype: torch.dtype

    @cached_property
    def listed(self) -> RunList:
        """The same runs as a kernel takes them."""
        slots = [run.slots.slots for run in self.runs]
        starts = [0, *accumulate(len(each) for each in slots)]
        rows = [
            [run.begin, run.end, run.before, start]
            for run, start in zip(self.runs, starts, strict=False)
        ]
        return RunList(torch.cat(slots).int(), torch.tensor(rows))

    @cached_property
    def band(self) -> CausalBand:
        """The mask that all runs share; not built where every run is plain."""
        rows = max(run.end - run.begin for run in self.runs)
        back = max(run.before + run.end - run.begin for run in self.runs)
        if self.window >= 0:
            back = min(back, self.window)
        return CausalBand(
            back=back, rows=min(rows, QUERY_BLOCK), window=self.window, dtype=self.dtype
        )


def group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Group indices so that filling up to a group's longest at most doubles the work.

    A group also stays within ``_GROUP_KEYS`` keys, unless one request alone is longer.
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if groups and _fits(lengths[index], lengths[groups[-1][0]], len(groups[-1])):
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _fits(length: int, longest: int, members: int) -> bool:
    return 2 * length >= longest and (members + 1) * longest <= _GROUP_KEYS


class Step:
    """One forward pass: the requests of a batch, and what each reach of the model reads for them.

    ``table``: int32 ``[requests, context]``, the slot of every token of every request.
    ``lines``: int64 ``[batch]``, each request's line in it. ``lengths``: keys of each request, new
    ones included. ``cached``: how many of those were there before, None in a decode step.
    ``translate`` maps slots to the sliding-window pool, where the model has one.
    """

    def __init__(
        self,
        table: torch.Tensor,
        lines: torch.Tensor,
        lengths: Sequence[int],
        cached: Sequence[int] | None,
        dtype: torch.dtype,
        translate: Translate | None = None,
    ) -> None:
        self._table = table
        self._lines = lines
        self._lengths = lengths
        self._cached = cached
        self._dtype = dtype
        self._translate = translate
        self._lists: dict[Reach, SlotList] = {}
        self._groups: dict[Reach, list[DecodeGroup]] = {}
        self._plans: dict[Reach, ExtendPlan] = {}

    def decode(self, reach: Reach) -> list[DecodeGroup]:
        """Return the groups of this decode step under ``reach``."""
        if reach not in self._groups:
            visible = [_visible(length - 1, reach.window) + 1 for length in self._lengths]
            groups = group_by_length(visible)
            self._groups[reach] = [self._group(group, visible, reach) for group in groups]
        return self._groups[reach]

    def ragged(self, reach: Reach) -> SlotList:
        """Return the slots of this decode step under ``reach``, for a kernel that walks pages."""
        if reach not in self._lists:
            visible = [_visible(length - 1, reach.window) + 1 for length in self._lengths]
            lines = self._lines.tolist()
            parts = [
                self._table[line, length - count : length]
                for line, length, count in zip(lines, self._lengths, visible, strict=True)
            ]
            slots = self._translated(torch.cat(parts), reach).int()
            self._lists[reach] = SlotList(slots, torch.tensor([0, *accumulate(visible)]))
        return self._lists[reach]

    def extend(self, reach: Reach) -> ExtendPlan:
        """Return the runs of this extend step under ``reach``."""
        if reach not in self._plans:
            self._plans[reach] = ExtendPlan(self._runs(reach), reach.window, self._dtype)
        return self._plans[reach]

    def _group(self, group: list[int], visible: list[int], reach: Reach) -> DecodeGroup:
        members = torch.tensor(group)
        ends = torch.tensor([self._lengths[index] for index in group]).unsqueeze(1)
        counts = torch.tensor([visible[index] for index in group]).unsqueeze(1)
        offsets = torch.arange(visible[group[0]])
        positions = torch.minimum(ends - counts + offsets, ends - 1)
        slots = self._table[self._lines[members].unsqueeze(1), positions]
        bias = torch.zeros(slots.shape).masked_fill_(offsets >= counts, float("-inf"))
        return DecodeGroup(members, self._slots(slots, reach), bias.unsqueeze(1))

    def _runs(self, reach: Reach) -> list[ExtendRun]:
        assert self._cached is not None, "a decode step has no new rows to lay out"
        runs: list[ExtendRun] = []
        begin = 0
        for index, (length, cached) in enumerate(zip(self._lengths, self._cached, strict=True)):
            end = begin + length - cached
            if end > begin:
                runs.append(self._run(index, begin, end, cached, reach))
            begin = end
        return runs

    def _run(self, index: int, begin: int, end: int, cached: int, reach: Reach) -> ExtendRun:
        before = _visible(cached, reach.window)
        length = cached + end - begin
        slots = self._table[self._lines[index], cached - before : length]
        plain = cached == 0 and _visible(length - 1, reach.window) == length - 1
        return ExtendRun(begin, end, before, self._slots(slots, reach), plain)

    def _slots(self, slots: torch.Tensor, reach: Reach) -> Slots:
        return Slots(self._translated(slots, reach).long())

    def _translated(self, slots: torch.Tensor, reach: Reach) -> torch.Tensor:
        if not reach.sliding_pool:
            return slots
        assert self._translate is not None, "no sliding-window pool was named"
        return self._translate(slots.long())


def _visible(before: int, window: int) -> int:
    """Return how many of the ``before`` keys ahead of a token it sees."""
    return before if window < 0 else min(before, window)

"""The CPU attention arithmetic against a plain float64 reference, batches of mixed lengths."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from sglang_ext.patches.cpu_attention_meta import CausalBand, Reach, Slots, Step, group_by_length
from sglang_ext.patches.cpu_attention_ops import (
    Scoring,
    apply_scale,
    attend_decode,
    attend_extend,
    gather,
)

_POOL_SLOTS = 4096
_PAGE = 16


@dataclass
class Case:
    """A pool with random pages and a batch of requests scattered over it."""

    lengths: list[int]
    cached: list[int] | None
    heads: int = 6
    kv_heads: int = 2
    width: int = 32
    window: int = -1
    soft_cap: float = 0.0
    dtype: torch.dtype = torch.float32
    pool_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (_POOL_SLOTS, self.kv_heads, self.width)
        self.keys = self._pages(torch.randn(shape, generator=generator))
        self.values = self._pages(torch.randn(shape, generator=generator))
        pages = torch.randperm(_POOL_SLOTS // _PAGE, generator=generator)
        self.table = torch.zeros(len(self.lengths), max(self.lengths), dtype=torch.int32)
        for line, length in enumerate(self.lengths):
            count = -(-length // _PAGE)
            own, pages = pages[:count], pages[count:]
            slots = (own.unsqueeze(1) * _PAGE + torch.arange(_PAGE)).flatten()
            self.table[line, :length] = slots[:length]
        new = [n - c for n, c in zip(self.lengths, self.cached or self.lengths, strict=True)]
        rows = sum(new) if self.cached else len(self.lengths)
        self.query = torch.randn(rows, self.heads, self.width, generator=generator).to(self.dtype)

    def _pages(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.dtype).to(self.pool_dtype or self.dtype)

    @property
    def scoring(self) -> Scoring:
        return Scoring(1 / math.sqrt(self.width), self.soft_cap)

    def step(self, translate: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Step:
        lines = torch.arange(len(self.lengths))
        return Step(self.table, lines, self.lengths, self.cached, self.dtype, translate)

    def extend(self) -> torch.Tensor:
        plan = self.step().extend(Reach(self.window, False))
        outputs = []
        for run in plan.runs:
            keys, values = self.read(run.slots)
            query = self.query[run.begin : run.end]
            outputs.append(attend_extend(query, keys, values, run, plan, self.scoring))
        return torch.cat(outputs)

    def decode(self) -> torch.Tensor:
        output = torch.empty_like(self.query)
        for group in self.step().decode(Reach(self.window, False)):
            keys, values = self.read(group.slots)
            query = self.query[group.requests]
            output[group.requests] = attend_decode(query, keys, values, group, self.scoring)
        return output

    def read(self, slots: Slots) -> tuple[torch.Tensor, torch.Tensor]:
        return gather(self.keys, slots, self.dtype), gather(self.values, slots, self.dtype)

    def expected(self) -> torch.Tensor:
        """One query row at a time, in float64."""
        rows, begin = [], 0
        cached = self.cached or [length - 1 for length in self.lengths]
        for line, (length, before) in enumerate(zip(self.lengths, cached, strict=True)):
            for position in range(before, length):
                rows.append(self._row(self.query[begin], line, position))
                begin += 1
        return torch.stack(rows).to(self.dtype)

    def _row(self, query: torch.Tensor, line: int, position: int) -> torch.Tensor:
        first = 0 if self.window < 0 else max(0, position - self.window)
        slots = self.table[line, first : position + 1].long()
        group = self.heads // self.kv_heads
        keys = self.keys.float()[slots].double().repeat_interleave(group, dim=1)
        values = self.values.float()[slots].double().repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,nhd->hn", query.double(), keys) * self.scoring.scale
        if self.soft_cap:
            scores = torch.tanh(scores / self.soft_cap) * self.soft_cap
        return torch.einsum("hn,nhd->hd", scores.softmax(-1), values)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Keep tiny products from waiting for a busy machine's other cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


_KINDS: dict[str, Any] = {
    "plain": {},
    "one kv head": {"kv_heads": 1},
    "no grouping": {"kv_heads": 6},
    "window": {"window": 20},
    "window longer than all": {"window": 4000},
    "soft cap": {"soft_cap": 1.5},
    "window and soft cap": {"window": 20, "soft_cap": 1.5},
    "e4m3 pages": {"pool_dtype": torch.float8_e4m3fn},
    "e5m2 pages": {"pool_dtype": torch.float8_e5m2},
}


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize(
    "lengths, cached",
    [
        ([300], [0]),
        ([7, 300, 64, 1], [0, 0, 0, 0]),
        ([7, 300, 900, 33], [6, 20, 885, 16]),
        ([50, 40, 300], [0, 16, 299]),
    ],
    ids=["cold", "cold batch", "hits", "mixed"],
)
def test_extend_equals_reference(kind: str, lengths: list[int], cached: list[int]) -> None:
    case = Case(lengths, cached, **_KINDS[kind])
    torch.testing.assert_close(case.extend(), case.expected(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("lengths", [[1], [300], [1, 900, 17, 500, 480, 3]])
def test_decode_equals_reference(kind: str, lengths: list[int]) -> None:
    case = Case(lengths, None, **_KINDS[kind])
    torch.testing.assert_close(case.decode(), case.expected(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("soft_cap", [0.0, 1.5])
def test_long_prompts_are_attended_in_blocks(soft_cap: float) -> None:
    case = Case([1100, 700], [100, 0], soft_cap=soft_cap, window=300)
    torch.testing.assert_close(case.extend(), case.expected(), rtol=1e-4, atol=1e-4)


def test_bfloat16_stays_within_its_own_precision() -> None:
    hits = Case([300, 70], [200, 0], dtype=torch.bfloat16)
    torch.testing.assert_close(hits.extend(), hits.expected(), rtol=2e-2, atol=1e-2)
    decode = Case([300, 70], None, dtype=torch.bfloat16)
    torch.testing.assert_close(decode.decode(), decode.expected(), rtol=2e-2, atol=1e-2)


def test_latent_pages_serve_as_keys_and_values() -> None:
    case = Case([300, 40], [280, 0], kv_heads=1, heads=8, width=48)
    case.values = case.keys
    torch.testing.assert_close(case.extend(), case.expected(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("decode", [False, True])
def test_values_may_be_narrower_than_keys(decode: bool) -> None:
    case = Case([300, 40], None if decode else [280, 0])
    case.values = case.values[..., :24].contiguous()
    outputs = torch.zeros(case.query.shape[0], case.heads, 24)
    if decode:
        for group in case.step().decode(Reach(-1, False)):
            read = case.read(group.slots)
            query = case.query[group.requests]
            outputs[group.requests] = attend_decode(query, *read, group, case.scoring)
    else:
        outputs = case.extend()
    torch.testing.assert_close(outputs, case.expected(), rtol=1e-4, atol=1e-4)


def test_gather_widens_every_fp8_code_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    slots = Slots(torch.arange(256))
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        buffer = codes.view(dtype).view(256, 1, 1)
        found = gather(buffer, slots, torch.float32).flatten()
        expected = codes.view(dtype).float()
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_gather_keeps_heads_apart() -> None:
    buffer = torch.arange(5 * 2 * 3).view(5, 2, 3).float()
    found = gather(buffer, Slots(torch.tensor([[4, 0], [1, 1]])), torch.float32)
    assert found.shape == (2, 2, 2, 3)
    assert torch.equal(found[0, 1], buffer[[4, 0], 1])
    assert torch.equal(found[1, 0], buffer[[1, 1], 0])


def test_apply_scale_takes_one_number_or_one_for_each_channel() -> None:
    heads = torch.ones(2, 4, 3)
    assert apply_scale(heads, None) is heads
    assert torch.equal(apply_scale(heads, torch.tensor(0.5)), heads * 0.5)
    by_channel = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    scaled = apply_scale(heads, by_channel)
    assert scaled[0].tolist() == [[1, 2, 3], [1, 2, 3], [4, 5, 6], [4, 5, 6]]


def test_groups_never_double_the_work() -> None:
    lengths = [1000, 10, 990, 501, 12, 4, 1010]
    groups = group_by_length(lengths)
    assert groups == [[6, 0, 2], [3], [4, 1], [5]]


def test_groups_stay_within_the_memory_bound() -> None:
    groups = group_by_length([4000] * 20 + [100_000])
    assert groups[0] == [20]
    assert [len(group) for group in groups[1:]] == [8, 8, 4]


def test_layers_of_one_reach_share_their_layout() -> None:
    step = Case([30, 40], [10, 0]).step()
    assert step.extend(Reach(-1, False)) is step.extend(Reach(-1, False))
    assert step.extend(Reach(-1, False)) is not step.extend(Reach(8, False))
    slots = step.extend(Reach(-1, False)).runs[0].slots
    assert slots.rows(2) is slots.rows(2)


def test_sliding_pool_reads_translated_slots() -> None:
    case = Case([30], None)
    step = case.step(translate=lambda slots: slots + 7)
    plain = step.decode(Reach(8, False))[0].slots.slots
    moved = step.decode(Reach(8, True))[0].slots.slots
    assert torch.equal(moved, plain + 7)
    assert plain.tolist() == [case.table[0, 21:30].tolist()]


def test_requests_without_new_rows_are_left_out() -> None:
    plan = Case([30, 20, 40], [10, 20, 0]).step().extend(Reach(-1, False))
    assert [(run.begin, run.end) for run in plan.runs] == [(0, 20), (20, 60)]


def test_band_slices_equal_the_mask_written_out() -> None:
    band = CausalBand(back=40, rows=8, window=5, dtype=torch.float32)
    mask = band.block(position=30, rows=6, first_key=25)
    for row in range(6):
        seen = [25 + column for column in torch.nonzero(mask[row] == 0).flatten().tolist()]
        assert seen == list(range(25 + row, 31 + row))

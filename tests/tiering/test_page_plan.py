"""Page plans name the very slots that a walk through the table finds, token by token."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.tiering.page_plan import PagePlan, pages_of, plan_pages, row_starts

_CONTEXT_PAGES, _LINES = 6, 8


def _table(seed: int, page_size: int) -> torch.Tensor:
    """A table whose requests own whole pages, scattered over the pool; page 0 is nobody's."""
    generator = torch.Generator().manual_seed(seed)
    pages = 1 + torch.randperm(_LINES * _CONTEXT_PAGES, generator=generator)
    slots = pages.unsqueeze(1) * page_size + torch.arange(page_size)
    return slots.view(_LINES, -1).int()


def _walk(plan: PagePlan, page_size: int) -> list[list[int]]:
    """Every request's slots in order, as FlashInfer's kernels reach them (paged_kv_t)."""
    found = []
    for request, last in enumerate(plan.last_page_len.tolist()):
        begin, end = plan.indptr[request : request + 2].tolist()
        length = 0 if begin == end else (end - begin - 1) * page_size + last
        pages = plan.indices[begin:end].tolist()
        found.append([pages[i // page_size] * page_size + i % page_size for i in range(length)])
    return found


@given(
    seed=st.integers(0, 2**31),
    page_size=st.sampled_from([1, 2, 16, 64]),
    wanted=st.lists(
        st.tuples(st.integers(0, _LINES - 1), st.floats(0, 1)), min_size=1, max_size=_LINES
    ),
)
def test_a_plan_is_the_naive_walk(
    seed: int, page_size: int, wanted: list[tuple[int, float]]
) -> None:
    table = _table(seed, page_size)
    lines = torch.tensor([line for line, _ in wanted])
    lengths = torch.tensor([round(share * table.shape[1]) for _, share in wanted])
    plan = plan_pages(table, lines, lengths, page_size)
    expected = [
        table[line, :length].tolist()
        for line, length in zip(lines.tolist(), lengths.tolist(), strict=True)
    ]
    assert _walk(plan, page_size) == expected
    assert plan.lengths.tolist() == lengths.tolist()
    assert all(
        tensor.dtype == torch.int32
        for tensor in (plan.indptr, plan.indices, plan.last_page_len, plan.lengths)
    )


@pytest.mark.parametrize(
    ("length", "last"), [(0, 0), (1, 1), (15, 15), (16, 16), (17, 1), (32, 16), (33, 1)]
)
def test_the_last_page_is_never_empty(length: int, last: int) -> None:
    plan = plan_pages(_table(0, 16), torch.tensor([3]), torch.tensor([length]), 16)
    assert plan.last_page_len.tolist() == [last]
    assert plan.indptr.tolist() == [0, -(-length // 16)]


def test_pages_of_one_token_are_slots() -> None:
    """SGLang's own plan, for comparison."""
    table = _table(1, 1)
    plan = plan_pages(table, torch.tensor([2]), torch.tensor([5]), 1)
    assert plan.indices.tolist() == table[2, :5].tolist()


def test_a_buffer_of_slots_is_a_buffer_of_pages_without_a_copy() -> None:
    buffer = torch.arange(4 * 16 * 2 * 3).view(4 * 16, 2, 3)
    pages = pages_of(buffer, 16)
    assert pages.shape == (4, 16, 2, 3)
    assert pages.data_ptr() == buffer.data_ptr()
    assert torch.equal(pages[2, 5], buffer[2 * 16 + 5])


def test_runs_start_where_the_one_before_ends() -> None:
    assert row_starts(torch.tensor([3, 0, 2])).tolist() == [0, 3, 3, 5]

"""Which pages are zeroed, on a pool of numbers."""

import torch

from sglang_ext.tiering.sealed_pages import SealedPages

PAGE = 4


class Pool:
    """Ten pages of ones."""

    def __init__(self) -> None:
        self.slots = torch.ones(10 * PAGE)
        self.wipes = 0
        self.sealed = SealedPages(10, PAGE, self.wipe)

    def wipe(self, pages: torch.Tensor) -> None:
        self.wipes += 1
        self.slots.view(10, PAGE).index_fill_(0, pages, 0)

    def zeroed(self) -> list[int]:
        """Return the pages that are zero; a page is zeroed whole or not at all."""
        rows = self.slots.view(10, PAGE)
        assert all(row.min() == row.max() for row in rows)
        return [page for page in range(10) if rows[page].max() == 0]


def slots(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def test_only_noted_pages_are_zeroed_and_only_when_freed() -> None:
    pool = Pool()
    pool.sealed.note(slots(4, 5, 30))
    assert pool.zeroed() == []
    pool.sealed.freed(slots(0, 1, 2))
    assert pool.zeroed() == [1]
    pool.sealed.freed_slots(slots(31, 28, 12, 13))
    assert pool.zeroed() == [1, 7]
    assert pool.sealed.wiped_pages == 2


def test_a_page_is_noted_until_it_was_freed_once() -> None:
    pool = Pool()
    pool.sealed.note(slots(4))
    pool.sealed.freed(slots(1))
    pool.slots.fill_(1)
    pool.sealed.freed(slots(1))
    assert pool.zeroed() == []
    pool.sealed.note(slots(4))
    pool.sealed.note(slots(5))
    pool.sealed.freed(slots(1))
    assert pool.zeroed() == [1]


def test_a_pool_that_begins_anew_keeps_nothing() -> None:
    pool = Pool()
    pool.sealed.note(slots(0, 39))
    pool.sealed.freed_all()
    assert pool.zeroed() == [0, 9]


def test_a_pool_without_sealed_pages_is_not_touched() -> None:
    pool = Pool()
    pool.sealed.freed(slots(1, 2))
    pool.sealed.freed_slots(slots(1, 2))
    pool.sealed.freed_all()
    pool.sealed.note(slots(4))
    pool.sealed.freed(slots(2))
    pool.sealed.freed(torch.empty(0, dtype=torch.int64))
    assert pool.wipes == 0


def test_slots_of_any_integer_type_are_understood() -> None:
    pool = Pool()
    pool.sealed.note(slots(4).to(torch.int32))
    pool.sealed.freed(slots(1).to(torch.int32))
    assert pool.zeroed() == [1]

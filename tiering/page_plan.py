"""From SGLang's table of slots to lists of pages, as FlashInfer takes them.

SGLang keeps for every request the pool slot of every token, and plans FlashInfer with pages of one
token. Its allocators hand out whole pages, so a request's slots are runs of ``page_size`` in a row:
every ``page_size``-th one names a page, and a list of pages is that much shorter and its reads that
much longer.

    slots of a request     32 33 .. 47   160 161 .. 175   64 65 66        page_size 16
    its pages              2             10               4               last_page_len 3

FlashInfer's planner reads its arrays on the host. What it reads there is made there, so that no
step waits for the device.
"""

from dataclasses import dataclass

import torch

__all__ = ["PagePlan", "pages_of", "plan_pages", "row_starts"]


@dataclass(frozen=True, slots=True)
class PagePlan:
    """The pages of a batch, int32. Request i has ``indices[indptr[i] : indptr[i + 1]]``.

    ``indptr`` [requests + 1], ``last_page_len`` and ``lengths`` [requests], in tokens, lie on the
    host, ``indices`` [pages] on the table's device. A request without tokens has no page, and 0 as
    ``last_page_len``; all others have 1 to ``page_size``.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    lengths: torch.Tensor


def plan_pages(
    table: torch.Tensor, lines: torch.Tensor, lengths: torch.Tensor, page_size: int
) -> PagePlan:
    """Return the pages of some requests.

    ``table``: int32 [requests, context], the slot of every token; ``lines``: int64 [n], which
    requests, on the same device; ``lengths``: integers [n] on the host, tokens of each. Needs slots
    as SGLang's allocator gives them with this page size. O(pages), one gather on the device.
    """
    lengths = lengths.long()
    pages = (lengths + page_size - 1) // page_size
    indptr = row_starts(pages)
    request = torch.repeat_interleave(torch.arange(len(lengths)), pages)
    first_token = (torch.arange(len(request)) - indptr.long()[request]) * page_size
    slots = table[lines[_move(request, table)], _move(first_token, table)]
    last = lengths - (pages - 1).clamp(min=0) * page_size
    return PagePlan(indptr, (slots // page_size).int(), last.int(), lengths.int())


def row_starts(lengths: torch.Tensor) -> torch.Tensor:
    """Return where each run starts, and where the last ends: int32 [runs + 1], from 0."""
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    starts[1:] = lengths.cumsum(dim=0)
    return starts


def pages_of(slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """View a pool buffer [slots, heads, dim] as [pages, page_size, heads, dim]."""
    return slots.unflatten(0, (-1, page_size))


def _move(index: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return index.to(table.device, non_blocking=True)

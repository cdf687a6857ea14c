"""Pages of one pool that hold bytes of sealed owners, and zeroing them when they are freed.

A page is noted before the first byte of a sealed owner reaches it, and zeroed on its way back to
the free list, so before anybody else can get it. Whoever frees it need not know whose it was.
"""

from collections.abc import Callable

import torch

__all__ = ["SealedPages"]


class SealedPages:
    """One bit a page. A pool in which nothing was noted costs nothing but one comparison a call.

    Pages are numbered from 0, page ``n`` has the slots ``n * page_size`` and on. ``wipe`` is given
    the numbers of distinct pages, a 1-d int64 tensor that is not empty, and zeroes them. One thread
    may free while others note: what is being freed is nobody's yet to write to.
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        wipe: Callable[[torch.Tensor], None],
        device: torch.device | str = "cpu",
    ) -> None:
        self.page_size = page_size
        self.wiped_pages = 0
        self._wipe = wipe
        self._held = torch.zeros(pages, dtype=torch.bool, device=device)
        self._any = False

    def note(self, slots: torch.Tensor) -> None:
        """Remember that these slots are about to get bytes of a sealed owner. Idempotent."""
        self._any = True
        self._held.index_fill_(0, self._pages_of(slots), True)

    def freed(self, pages: torch.Tensor) -> None:
        """Zero those of ``pages``, each given once, that hold bytes of a sealed owner.

        Where any is noted, this waits for the device: it has to know which.
        """
        if not self._any or not pages.numel():
            return
        pages = pages.to(self._held.device, torch.int64)
        self._zero(pages[self._held[pages]])

    def freed_slots(self, slots: torch.Tensor) -> None:
        """Do the same with the pages of ``slots``, in any order."""
        if self._any and slots.numel():
            self.freed(torch.unique(self._pages_of(slots)))

    def freed_all(self) -> None:
        """Zero every page that was noted: the pool is about to begin anew."""
        if self._any:
            self._zero(torch.nonzero(self._held).flatten())
            self._any = False

    def _pages_of(self, slots: torch.Tensor) -> torch.Tensor:
        slots = slots.to(self._held.device, torch.int64)
        return torch.div(slots, self.page_size, rounding_mode="floor")

    def _zero(self, pages: torch.Tensor) -> None:
        if not pages.numel():
            return
        self._wipe(pages)
        self._held.index_fill_(0, pages, False)
        self.wiped_pages += pages.numel()

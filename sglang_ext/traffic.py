"""What moved between the tiers of one cache: bytes and seconds by where from and where to."""

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_ext.types import Tier

__all__ = ["MeasuredCache", "Move"]

Move = tuple[Tier, Tier]
"""Where bytes came from and where they went."""

_DOWN, _UP = (Tier.HBM, Tier.CPU), (Tier.CPU, Tier.HBM)
_TO_DISK, _FROM_DISK = (Tier.CPU, Tier.NVME), (Tier.NVME, Tier.CPU)
_READY_KEPT = 4096


class MeasuredCache(UnifiedRadixCache):
    """SGLang's cache, with a meter on every way between two tiers.

    Two threads move pages to and from the disk, a third owns the tree; each adds to keys of its
    own. ``ready_seconds`` takes how long what the disk delivered waited to be of use.
    """

    def __init__(self, params: Any) -> None:
        self.moved_bytes: Counter[Move] = Counter()
        self.moved_seconds: Counter[Move] = Counter()
        self.ready_seconds: deque[float] = deque(maxlen=_READY_KEPT)
        super().__init__(params)

    def init_hicache(self, server_args: Any, params: Any) -> None:
        super().init_hicache(server_args, params)
        controller = self.cache_controller
        if controller is not None and controller.storage_backend is not None:
            controller.page_get_func = self._reading(controller.page_get_func)
            controller.page_set_func = self._writing(controller.page_set_func)

    def loaded_back(self, tokens: int, seconds: float) -> None:
        """Take note that so many tokens went from host memory to HBM; for a subclass."""

    def loading_check(self, finish_count: int | None = None) -> None:
        done = self.cache_controller.ack_load_queue[: finish_count or 0]
        super().loading_check(finish_count)
        for ack in done:
            seconds = self._note(_UP, ack)
            if seconds is not None:
                self.loaded_back(ack.num_tokens, seconds)

    def _log_write_ack_metrics(self, ack: Any) -> None:
        super()._log_write_ack_metrics(ack)
        self._note(_DOWN, ack)

    def _note(self, move: Move, ack: Any) -> float | None:
        """Count one copy; return its seconds where the device tells them."""
        self.moved_bytes[move] += ack.num_bytes
        if not ack.timing_enabled:
            return None
        seconds = float(ack.start_event.elapsed_time(ack.finish_event)) / 1000
        self.moved_seconds[move] += seconds  # type: ignore[assignment]
        return seconds

    def _reading(self, read: Callable[..., int]) -> Callable[..., int]:
        def measured(operation: Any, hashes: Any, host_indices: Any, extra_info: Any = None) -> int:
            start = time.monotonic()
            pages = read(operation, hashes, host_indices, extra_info)
            operation.delivered_at = time.monotonic()
            seconds = operation.delivered_at - start
            operation.read_seconds = getattr(operation, "read_seconds", 0.0) + seconds
            self._note_pages(_FROM_DISK, pages, seconds)
            return pages

        return measured

    def _writing(self, write: Callable[..., bool]) -> Callable[..., bool]:
        def measured(hashes: Any, host_indices: Any, extra_info: Any = None) -> bool:
            start = time.monotonic()
            stored = write(hashes, host_indices, extra_info)
            self._note_pages(_TO_DISK, len(hashes) if stored else 0, time.monotonic() - start)
            return stored

        return measured

    def _note_pages(self, move: Move, pages: int, seconds: float) -> None:
        token_bytes = self.cache_controller.mem_pool_host.size_per_token
        self.moved_bytes[move] += pages * self.page_size * token_bytes
        self.moved_seconds[move] += seconds  # type: ignore[assignment]

    def _note_ready(self, operation: Any) -> None:
        """Take note that a request may use what the disk delivered."""
        delivered = getattr(operation, "delivered_at", None)
        if delivered is not None:
            self.ready_seconds.append(time.monotonic() - delivered)

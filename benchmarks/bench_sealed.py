"""What zeroing costs: a sealed tenant's pages when they are freed, and everybody else's.

Pools of the demo model's shape on this machine's CPU; plain and sealed frees take turns in one run.
The scale is what computing a prompt token of that model takes, measured by ``bench_engine_cpu``.
"""

import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from benchmarks.report import Report, arguments, spread
from sglang_ext.patches.sealed_pages import _release_pages
from sglang_ext.sealing import _by_page
from sglang_ext.tiering.sealed_pages import SealedPages

_PAGE, _HEADS, _DIM, _LAYERS = 16, 3, 64, 30
_TOKENS = 8192
_FREED = 1024
_TOKEN_BYTES = 2 * _LAYERS * _HEADS * _DIM * 2


def main() -> int:
    parser = arguments("bench_sealed", __doc__ or "")
    parser.add_argument("--token-us", type=float, default=740.0, help="to compute a prompt token")
    options = parser.parse_args()
    rounds = 20 if options.quick else 200
    torch.set_num_threads(1)
    allocator, layers = _pools()
    sealed = _follow(allocator, layers)
    times: dict[str, list[float]] = {"never": [], "plain": [], "sealed": [], "memset": []}
    blank = torch.empty(_FREED * _TOKEN_BYTES, dtype=torch.uint8)
    for _ in range(rounds):
        times["never"].append(_free(allocator, None))
        times["memset"].append(_seconds(blank.zero_))
    for _ in range(rounds):
        # From the first sealed page on, each call has to ask whose its pages were.
        times["sealed"].append(_free(allocator, sealed.note))
        times["plain"].append(_free(allocator, None))
        times["memset"].append(_seconds(blank.zero_))
    return _report(times, options.token_us).finish(options.json)


def _report(times: dict[str, list[float]], token_us: float) -> Report:
    report = Report("Zeroing 1,024 freed tokens (23 KB each), one thread")
    median = {name: spread(values).median for name, values in times.items()}
    report.figures = {
        f"{name}, microseconds a token": 1e6 * s / _FREED for name, s in median.items()
    }
    report.figures["GB zeroed a second"] = _FREED * _TOKEN_BYTES / median["sealed"] / 1e9
    per_token = 1e6 * (median["sealed"] - median["never"]) / _FREED
    report.at_most("zeroing over computing a token", per_token / token_us, 0.02)
    asked = 1e6 * (median["plain"] - median["never"]) / _FREED
    report.at_most("asking over computing a token, of others", asked / token_us, 0.001)
    return report


def _pools() -> tuple[PagedTokenToKVPoolAllocator, list[torch.Tensor]]:
    shape = (_HEADS, _DIM, _LAYERS)
    pool = MHATokenToKVPool(_TOKENS, _PAGE, torch.bfloat16, *shape, "cpu", False)
    allocator = PagedTokenToKVPoolAllocator(
        _TOKENS, _PAGE, dtype=torch.bfloat16, device="cpu", kvcache=pool, need_sort=False
    )
    return allocator, [*pool.k_buffer, *pool.v_buffer]


def _follow(allocator: PagedTokenToKVPoolAllocator, layers: list[torch.Tensor]) -> SealedPages:
    """Do what ``sglang_ext.sealing`` and its hooks do in a server."""
    rows = [_by_page(layer, _PAGE) for layer in layers]

    def wipe(freed: torch.Tensor) -> None:
        for layer in rows:
            layer.index_fill_(0, freed, 0)

    sealed = allocator.sealed_pages = SealedPages(rows[0].shape[0], _PAGE, wipe)
    original = PagedTokenToKVPoolAllocator._release_page_ids
    allocator._release_page_ids = partial(_release_pages, original, allocator)
    return sealed


def _free(
    allocator: PagedTokenToKVPoolAllocator, note: Callable[[torch.Tensor], None] | None
) -> float:
    slots = allocator.alloc(_FREED)
    if note is not None:
        note(slots)
    return _seconds(partial(allocator.free_segment, slots, start_pos=0))


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


if __name__ == "__main__":
    sys.exit(main())

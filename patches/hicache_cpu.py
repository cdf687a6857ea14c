"""Host memory as a cache tier where the device is a CPU: what SGLang's HiCache lacks there.

SGLang copies between device and host pools with CUDA kernels, registers host memory with the CUDA
driver, and leaves 10 GiB of the machine alone. On a CPU both pools are ordinary memory, so a copy
is an index copy and nothing can be registered; it is over when it returns, and its events tell how
long it took, which torch's own for a CPU do not. Needs ``--hicache-io-backend direct`` with
``--hicache-mem-layout layer_first``. Never called where an accelerator serves.
"""

import inspect
import os
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from sglang_ext.errors import HookError
from sglang_ext.patches.versions import SGLANG_VERSION

__all__ = ["CopyEvent", "copy_pages", "enable_hicache"]

_COPY = "transfer_kv_direct"
_RESERVE = "HICACHE_HOST_MEMORY_RESERVE_BYTES"
_MOST_RESERVE_BYTES = 10 * 2**30
_RESERVE_FRACTION = 10
_EVENTS = "make_timing_event_pair"


class CopyEvent:
    """A moment at which everything before it is done, as on a CPU it always is."""

    def __init__(self) -> None:
        self.at = 0.0

    def record(self, stream: Any = None) -> None:
        """Take the present as the moment."""
        self.at = time.perf_counter()

    def elapsed_time(self, end: "CopyEvent") -> float:
        """Return the milliseconds from here to ``end``, as CUDA's events do."""
        return (end.at - self.at) * 1000

    def query(self) -> bool:
        """Tell whether the moment has come."""
        return True

    def synchronize(self) -> None:
        """Wait for the moment: it has come."""

    def wait(self, stream: Any = None) -> None:
        """Let a stream wait for the moment: it has come."""


def copy_pages(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy tokens between layers, bit for bit and whole pages at a time, whatever their type.

    A layer is ``[tokens, ...]``. ``src_indices`` and ``dst_indices`` name tokens; each run of
    ``page_size`` of them is one page, as the allocators of both pools give them out.
    """
    src = torch.div(src_indices[::page_size], page_size, rounding_mode="floor").long()
    dst = torch.div(dst_indices[::page_size], page_size, rounding_mode="floor").long()
    for source, target in zip(src_layers, dst_layers, strict=True):
        _pages(target, page_size).index_copy_(0, dst, _pages(source, page_size)[src])


def enable_hicache() -> None:
    """Let HiCache allocate and copy on this machine; idempotent, after SGLang's modules are loaded.

    Raises HookError where a target is not what this release was written for.
    """
    # Imported late: these modules ask SGLang's platform, which imports this one.
    from sglang.srt.mem_cache import l2_transfer
    from sglang.srt.mem_cache.pool_host import base, mha, mla
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    _lower_reserve(base)
    _expect(hasattr(l2_transfer, _EVENTS), f"{l2_transfer.__name__} has no {_EVENTS}")
    setattr(l2_transfer, _EVENTS, _timed_events)
    for module, pool in ((mha, mha.MHATokenToKVPoolHost), (mla, mla.MLATokenToKVPoolHost)):
        _offer_copy(module, pool.load_to_device_per_layer)
        _offer_copy(module, pool.backup_from_device_all_layer)
    init = base.HostKVCache.__init__
    if not hasattr(init, "__wrapped__"):
        _expect("pin_memory" in inspect.signature(init).parameters, "HostKVCache has no pin_memory")
        target = f"{base.__name__}.HostKVCache.__init__"
        HookRegistry.register(target, _without_pinning, HookType.AROUND)
        HookRegistry.apply_hooks()
    wrapped = hasattr(base.HostKVCache.__init__, "__wrapped__")
    _expect(wrapped, "the hook on HostKVCache was not applied; see the log above")


def _timed_events() -> tuple[CopyEvent, CopyEvent, bool]:
    """Return start and end of one copy, and that they tell its time."""
    return CopyEvent(), CopyEvent(), True


def _pages(layer: torch.Tensor, page_size: int) -> torch.Tensor:
    """View a layer as one row of bytes a page."""
    return layer.view(torch.uint8).view(layer.shape[0] // page_size, -1)


def _without_pinning(original: Callable[..., None], pool: Any, **parameters: Any) -> None:
    """Allocate ordinary memory; SGLang asks for pinned memory whatever the platform says."""
    original(pool, **{**parameters, "pin_memory": False})


def _offer_copy(module: ModuleType, method: Callable[..., None]) -> None:
    names = inspect.unwrap(method).__code__.co_names
    _expect(_COPY in names, f"{method.__qualname__} does not call {_COPY}")
    if not hasattr(module, _COPY):
        setattr(module, _COPY, copy_pages)


def _lower_reserve(module: ModuleType) -> None:
    """Leave a tenth of a small machine alone instead of 10 GiB."""
    _expect(hasattr(module, _RESERVE), f"{module.__name__} has no {_RESERVE}")
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    setattr(module, _RESERVE, min(_MOST_RESERVE_BYTES, total // _RESERVE_FRACTION))


def _expect(holds: bool, problem: str) -> None:
    if not holds:
        raise HookError(f"{problem}; sglang_ext needs sglang {SGLANG_VERSION}, unmodified")

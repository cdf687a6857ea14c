"""Torch in place of the Triton kernels that SGLang starts without asking what the platform can do.

Most places ask ``capabilities.supports_triton``. Two do not: the one that looks up where a
request's last page ends, which asks for the attention backend's name, and the cap on final logits
(Gemma 2), which asks for SGLang's own CPU engine.
"""

from types import ModuleType

import torch

from sglang_ext.errors import HookError
from sglang_ext.patches.versions import check_signature

__all__ = ["cap_logits", "last_locations", "replace_triton_kernels"]


def last_locations(
    req_to_token: torch.Tensor,
    req_pool_indices_tensor: torch.Tensor,
    prefix_lens_tensor: torch.Tensor,
) -> torch.Tensor:
    """Return the slot of each request's last cached token, -1 where nothing is cached.

    ``req_to_token``: int32 ``[requests, context]``. The others: int64 ``[batch]``, as the result.
    """
    last = (prefix_lens_tensor - 1).clamp(min=0)
    slots = req_to_token[req_pool_indices_tensor, last].to(prefix_lens_tensor.dtype)
    return slots.masked_fill(prefix_lens_tensor == 0, -1)


def cap_logits(full_logits: torch.Tensor, final_logit_softcapping: float) -> torch.Tensor:
    """Bend logits into ``(-cap, cap)`` by tanh, in place."""
    full_logits.div_(final_logit_softcapping).tanh_().mul_(final_logit_softcapping)
    return full_logits


def replace_triton_kernels() -> None:
    """Put the functions above where SGLang looks for its kernels; idempotent.

    Raises HookError where a target has changed or the hook did not apply.
    """
    # Imported late: both targets import SGLang's platform, which imports this module.
    from sglang.srt.layers import logits_processor
    from sglang.srt.mem_cache import allocation
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    targets = (
        (allocation, "get_last_loc_triton", last_locations),
        (logits_processor, "fused_softcap", cap_logits),
    )
    for module, name, function in targets:
        if not _replaced(module, name):
            parameters = function.__code__.co_varnames[: function.__code__.co_argcount]
            check_signature(getattr(module, name), parameters)
            HookRegistry.register(f"{module.__name__}.{name}", function, HookType.REPLACE)
    HookRegistry.apply_hooks()
    missing = [name for module, name, _ in targets if not _replaced(module, name)]
    if missing:
        raise HookError(f"SGLang did not apply the hook on {', '.join(missing)}; see the log above")


def _replaced(module: ModuleType, name: str) -> bool:
    return hasattr(getattr(module, name), "__wrapped__")

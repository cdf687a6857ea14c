"""Makes the CPU attention backend known to SGLang under the name ``sglang_ext_cpu``.

Registration has to come before the command line is parsed, in every process. The backend itself is
imported when a model runner asks for it, because it imports half of SGLang.
"""

from typing import Any

from sglang_ext.errors import HookError
from sglang_ext.patches.versions import check_signature

__all__ = ["CPU_ATTENTION", "offer_cpu_attention", "register_cpu_attention"]

CPU_ATTENTION = "sglang_ext_cpu"
"""The backend's name on the command line."""

_TRITON_LAST_LOC = "sglang.srt.mem_cache.allocation.get_last_loc_triton"


def offer_cpu_attention() -> None:
    """Let ``--attention-backend`` accept our name; idempotent and cheap to import."""
    from sglang.srt.arg_groups import choices

    if CPU_ATTENTION not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([CPU_ATTENTION])


def register_cpu_attention() -> None:
    """Offer the backend's name and register what builds it; idempotent."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    offer_cpu_attention()
    register_attention_backend(CPU_ATTENTION)(_create)


def _create(runner: Any) -> Any:
    """Build the backend of one model runner, and settle what SGLang keys on a backend's name."""
    from sglang_ext.patches.cpu_attention_backend import CpuAttentionBackend

    _use_torch_last_loc()
    if runner.use_mla_backend:
        _use_absorbed_latents()
    return CpuAttentionBackend(runner)


def _use_absorbed_latents() -> None:
    """Attend latents as stored: SGLang's fallback would hand prefill to a path without pages."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
    )
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    AttentionBackendRegistry.register(CPU_ATTENTION, lambda attn, batch: AttnForwardMethod.MLA)


def _use_torch_last_loc() -> None:
    """Replace a Triton kernel that SGLang runs for every backend not called ``torch_native``.

    With pages of more than one token it looks up where each request's last page ends.
    """
    from sglang.srt.mem_cache import allocation
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    original = allocation.get_last_loc_triton
    if hasattr(original, "__wrapped__"):
        return
    check_signature(original, ("req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor"))
    HookRegistry.register(_TRITON_LAST_LOC, allocation.get_last_loc_torch, HookType.REPLACE)
    HookRegistry.apply_hooks()
    if allocation.get_last_loc_triton is original:
        raise HookError(f"the hook on {_TRITON_LAST_LOC} did not apply; see the log above")

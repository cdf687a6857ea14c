"""Makes the CPU attention backend known to SGLang under the name ``sglang_ext_cpu``.

Registration has to come before the command line is parsed, in every process. The backend itself is
imported when a model runner asks for it, because it imports half of SGLang.
"""

from typing import Any

__all__ = ["CPU_ATTENTION", "offer_cpu_attention", "register_cpu_attention"]

CPU_ATTENTION = "sglang_ext_cpu"
"""The backend's name on the command line."""


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
    """Build the backend of one model runner."""
    from sglang_ext.patches.cpu_attention_backend import CpuAttentionBackend

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

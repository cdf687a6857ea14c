"""Makes attention over real pages known to SGLang under the name ``sglang_ext_flashinfer``.

For NVIDIA GPUs, and not yet run on one. Registration has to come before the command line is parsed,
in every process; FlashInfer is imported when a model runner asks for the backend.
"""

from typing import Any

from sglang_ext.errors import UnsupportedError

__all__ = [
    "FLASHINFER_PAGES",
    "offer_flashinfer_pages",
    "refuse_without_gpu",
    "register_flashinfer_pages",
]

FLASHINFER_PAGES = "sglang_ext_flashinfer"
"""The backend's name on the command line."""


def refuse_without_gpu(attention_backend: str | None) -> None:
    """Raise UnsupportedError where our backend is chosen on a machine without a GPU."""
    if attention_backend == FLASHINFER_PAGES:
        raise UnsupportedError(
            f"{FLASHINFER_PAGES} needs an NVIDIA GPU, and this machine shows none; leave "
            "--attention-backend out to let the CPU platform choose"
        )


def offer_flashinfer_pages() -> None:
    """Let ``--attention-backend`` accept our name; idempotent and cheap to import."""
    from sglang.srt.arg_groups import choices

    if FLASHINFER_PAGES not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([FLASHINFER_PAGES])


def register_flashinfer_pages() -> None:
    """Offer the backend's name and register what builds it; idempotent."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    offer_flashinfer_pages()
    register_attention_backend(FLASHINFER_PAGES)(_create)


def _create(runner: Any) -> Any:
    """Build the backend of one model runner; raise UnsupportedError where it cannot run."""
    from sglang_ext.patches.flashinfer_backend import FlashInferPagesBackend, load_flashinfer

    flashinfer = load_flashinfer()
    if runner.use_mla_backend:
        _use_absorbed_latents()
    return FlashInferPagesBackend(runner, flashinfer)


def _use_absorbed_latents() -> None:
    """Attend latents as stored: SGLang's fallback would hand prefill to a path without pages."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
    )
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    AttentionBackendRegistry.register(FLASHINFER_PAGES, lambda attn, batch: AttnForwardMethod.MLA)

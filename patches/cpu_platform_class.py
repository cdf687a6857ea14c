"""The platform class itself, apart from ``cpu_platform`` because it imports SGLang."""

import logging
from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from sglang_ext.patches.cpu_attention import (
    CPU_ATTENTION,
    offer_cpu_attention,
    register_cpu_attention,
)
from sglang_ext.patches.cpu_kernels import replace_triton_kernels
from sglang_ext.patches.cpu_ops import register_ops
from sglang_ext.patches.cpu_threads import bind_rank, set_thread_defaults
from sglang_ext.patches.flashinfer_pages import refuse_without_gpu
from sglang_ext.patches.hicache_cpu import enable_hicache

__all__ = ["ExtCpuPlatform"]

_MODEL_REGISTRY = "sglang.srt.models.registry"
_MISSING_KERNEL = "causal_conv1d_fn"


class ExtCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU that runs SGLang's plain torch operators."""

    # OOT, not CPU: the in-tree CPU paths call kernels that the ordinary wheel does not have.
    _enum = PlatformEnum.OOT

    def __init__(self) -> None:
        # SGLang builds its platform in every process, before it reads the command line.
        offer_cpu_attention()
        logging.getLogger(_MODEL_REGISTRY).addFilter(_is_news)

    def init_backend(self) -> None:
        """Register what only the process of a model runner needs."""
        register_cpu_attention()

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Choose our attention, and turn graph capture and overlap scheduling off.

        For ``--device cpu`` SGLang has by now chosen ``intel_amx`` itself, which needs a build of
        its own (on ARM it has chosen ``torch_native``: there name ours on the command line).
        """
        # Imported late: this module is loaded while SGLang's own utilities still are.
        from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

        refuse_without_gpu(server_args.attention_backend)
        # There is no device to overlap with: a result would only wait for the next batch.
        server_args.disable_overlap_schedule = True
        if server_args.attention_backend == "intel_amx":
            server_args.attention_backend = CPU_ATTENTION
        # SGLang itself does this for ``torch_native`` alone.
        set_thread_defaults(server_args.tp_size * server_args.pp_size * server_args.dp_size)
        for phase in (Phase.DECODE, Phase.PREFILL):
            server_args.cuda_graph_config = with_phase(
                server_args.cuda_graph_config, phase, backend=Backend.DISABLED
            )

    def post_load_model(self, model: Any) -> None:
        """Replace what no CPU runs, before the first batch and cache, and after all imports.

        With another attention backend than ours, the model's operators stay SGLang's own.
        """
        from sglang.srt.runtime_context import attention_backends, get_device

        replace_triton_kernels()
        enable_hicache()
        bind_rank(get_device().gpu_id)
        if CPU_ATTENTION in attention_backends():
            from sglang_ext.patches.cpu_linear import speed_up_linears

            register_ops(self.get_dispatch_key_name())
            speed_up_linears(model)

    def get_dispatch_key_name(self) -> str:
        """Select the ``forward_native`` version of every operator."""
        return "native"

    def get_default_attention_backend(self) -> str:
        """Return the attention backend used when the command line names none."""
        return CPU_ATTENTION


def _is_news(record: logging.LogRecord) -> bool:
    """Leave out that models with a state space need a kernel that a CPU has not."""
    return _MISSING_KERNEL not in record.getMessage()

"""The platform class itself, apart from ``cpu_platform`` because it imports SGLang."""

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

__all__ = ["ExtCpuPlatform"]


class ExtCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU that runs SGLang's plain torch operators."""

    # OOT, not CPU: the in-tree CPU paths call kernels that the ordinary wheel does not have.
    _enum = PlatformEnum.OOT

    def get_dispatch_key_name(self) -> str:
        """Select the ``forward_native`` version of every operator."""
        return "native"

    def get_default_attention_backend(self) -> str:
        """Return the attention backend used when the command line names none."""
        return "torch_native"

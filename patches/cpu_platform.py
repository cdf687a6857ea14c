"""SGLang's out-of-tree platform for machines without an accelerator.

SGLang's own CPU engine needs a build of its own; its ordinary wheel serves on a CPU only through a
platform plugin. SGLang finds this one through the entry point group ``sglang.srt.platforms``.
"""

import os

__all__ = ["activate"]

_PLATFORM_CLASS = "sglang_ext.patches.cpu_platform_class.ExtCpuPlatform"


def _has_accelerator() -> bool:
    import torch

    return torch.accelerator.is_available()


def activate() -> str | None:
    """Name our platform class, or None where an accelerator or SGLang's own CPU engine serves.

    An activated plugin wins over SGLang's own detection, so it must stand back on a GPU machine.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1" or _has_accelerator():
        return None
    return _PLATFORM_CLASS

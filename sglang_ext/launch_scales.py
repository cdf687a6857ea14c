"""The FP8 scales that the policy names: checked against model and flags before anything starts."""

from pathlib import Path
from typing import Any

from sglang_ext.errors import UnsupportedError
from sglang_ext.tenancy.policy import Policy

__all__ = ["use_scales"]

_FIELD = "engine.kv_scales"


def use_scales(policy: Policy, server_args: Any, *, on_cpu: bool) -> None:
    """Hand the policy's scales, if any, to every process of the server.

    ``server_args`` is a resolved view of SGLang's. Reads the whole checkpoint once. Raises
    ScalesError for a file of another model or format, UnsupportedError where nobody would use it.
    """
    path = policy.engine.kv_scales
    if path is None:
        return
    # Imported late: most servers have no scales, and this loads torch.
    from sglang_ext.patches.cpu_attention import CPU_ATTENTION
    from sglang_ext.patches.flashinfer_pages import FLASHINFER_PAGES
    from sglang_ext.tiering.quantizer import FORMATS
    from sglang_ext.tiering.scales import checkpoint_hash, load_scales
    from sglang_ext.tiering.scales_in_force import hand_over

    reader = CPU_ATTENTION if on_cpu else FLASHINFER_PAGES
    if server_args.attention_backend != reader:
        raise UnsupportedError(
            f"{_FIELD}: only the attention {reader} reads pages with calibrated scales here; run "
            f"with --attention-backend {reader}, or remove it (engine.kv_cache_dtype alone works "
            "everywhere)"
        )
    format = FORMATS.get(server_args.kv_cache_dtype)
    if format is None:
        raise UnsupportedError(
            f"{_FIELD}: pages are {server_args.kv_cache_dtype}; set engine.kv_cache_dtype to one "
            f"of {', '.join(FORMATS)}"
        )
    model = Path(server_args.model_path)
    if not model.is_dir():
        raise UnsupportedError(f"{_FIELD}: give --model-path as a folder, found {model}")
    load_scales(path, weights=checkpoint_hash(model), format=format)
    hand_over(path)

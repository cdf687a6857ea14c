"""What makes a page valid besides its text: weights in memory, configuration, FP8 scales."""

import json
from typing import Any

import torch
from xxhash import xxh3_128

__all__ = ["kv_scales", "weights_hash"]


def weights_hash(model: torch.nn.Module, config: Any) -> str:
    """Return a hash of every weight that ``model`` holds on this rank, and of its configuration.

    Two models under one name never share it, however they were loaded. Reads all weights once:
    about 0.1 s for each GB in host memory, more over a slow bus.
    """
    digest = xxh3_128(json.dumps(config.to_dict(), sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().reshape(-1).cpu()
        digest.update(flat.view(torch.uint8).numpy())
    return digest.hexdigest()


def kv_scales(model: torch.nn.Module) -> str:
    """Return the FP8 scales of every layer as text, empty where there are none."""
    found = [
        (name, scale, getattr(module, "v_scale_float", None))
        for name, module in model.named_modules()
        if (scale := getattr(module, "k_scale_float", None)) is not None
    ]
    return repr(found) if found else ""

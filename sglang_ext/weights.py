"""What makes a page valid besides its text: weights in memory, configuration, FP8 scales."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from xxhash import xxh3_128

__all__ = ["kv_scales", "lasting_adapters", "weights_hash"]

_ADAPTER_TENSORS = ("embedding_layers", "added_tokens_embeddings")


def weights_hash(model: torch.nn.Module, config: Any, adapters: Iterable[Any] = ()) -> str:
    """Return a hash of every weight that ``model`` holds on this rank, and of its configuration.

    Two models under one name never share it, however they were loaded; nor do two sets of LoRA
    ``adapters``. Reads all weights once: about 0.1 s for each GB in host memory, more over a slow
    bus.
    """
    digest = xxh3_128(json.dumps(config.to_dict(), sort_keys=True, default=str).encode())
    _add(digest, model.state_dict())
    for adapter in sorted(adapters, key=lambda adapter: str(adapter.uid)):
        digest.update(f"{adapter.uid} {adapter.scaling}".encode())
        for tensors in _tensors_of(adapter):
            _add(digest, tensors)
    return digest.hexdigest()


def lasting_adapters(manager: Any) -> list[Any]:
    """Return the LoRA adapters of the command line, whose ids are the same at the next start.

    ``manager`` is SGLang's LoRAManager, or None. The id of an adapter that is loaded later is drawn
    at random, so that pages computed with it are never found again.
    """
    if manager is None:
        return []
    return [
        manager.loras[name]
        for name, ref in manager.lora_refs.items()
        if name == ref.deterministic_id(ref.lora_name, ref.lora_path)
    ]


def _tensors_of(adapter: Any) -> Iterator[Mapping[str, torch.Tensor]]:
    for layer in adapter.layers:
        yield layer.weights
    for name in _ADAPTER_TENSORS:
        yield getattr(adapter, name)


def _add(digest: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().reshape(-1).cpu()
        digest.update(flat.view(torch.uint8).numpy())


def kv_scales(model: torch.nn.Module) -> str:
    """Return the FP8 scales of every layer as text, empty where there are none."""
    found = [
        (name, scale, getattr(module, "v_scale_float", None))
        for name, module in model.named_modules()
        if (scale := getattr(module, "k_scale_float", None)) is not None
    ]
    return repr(found) if found else ""

"""What identifies a model's pages: every weight, the configuration, the scales; not its name."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.lora.lora import LoRAAdapter
from sglang.srt.lora.lora_registry import LoRARef

from sglang_ext.weights import kv_scales, lasting_adapters, weights_hash

CONFIG = SimpleNamespace(to_dict=lambda: {"rope_theta": 10000})


def model(dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)).to(dtype)
    made.register_buffer("scale", torch.tensor(1.0))
    return made


def test_equal_models_have_one_hash() -> None:
    assert weights_hash(model(), CONFIG) == weights_hash(model(), CONFIG)


def flip_last_bit(changed: Any) -> None:
    changed[1].weight.data.view(torch.int16)[-1, -1] ^= 1


def set_buffer(changed: Any) -> None:
    changed.scale.fill_(2.0)


@pytest.mark.trial(49)
@pytest.mark.parametrize("change", [flip_last_bit, set_buffer])
def test_any_change_of_a_weight_changes_it(change: Any) -> None:
    changed = model()
    change(changed)
    assert weights_hash(changed, CONFIG) != weights_hash(model(), CONFIG)


def test_type_shape_and_configuration_count() -> None:
    hashes = {
        weights_hash(model(), CONFIG),
        weights_hash(model(torch.float16), CONFIG),
        weights_hash(model(), SimpleNamespace(to_dict=lambda: {"rope_theta": 1})),
        weights_hash(torch.nn.Linear(2, 8, bias=False), CONFIG),
        weights_hash(torch.nn.Linear(8, 2, bias=False), CONFIG),
    }
    assert len(hashes) == 5


def test_scales_are_named_by_layer() -> None:
    scaled: Any = model()
    assert kv_scales(scaled) == ""
    scaled[0].k_scale_float, scaled[0].v_scale_float = 0.5, 2.0
    first = kv_scales(scaled)
    scaled[0].v_scale_float = 3.0
    assert first and kv_scales(scaled) != first


def adapter(seed: int = 0, uid: str = "one", scaling: float = 1.0) -> Any:
    """Return what SGLang's LoRAAdapter holds."""
    draw = torch.Generator().manual_seed(seed)
    weights = {"q_proj.lora_A": torch.randn(4, 8, generator=draw)}
    layer = SimpleNamespace(weights=weights)
    nothing: dict[str, torch.Tensor] = {}
    return SimpleNamespace(
        uid=uid,
        scaling=scaling,
        layers=[layer],
        embedding_layers=nothing,
        added_tokens_embeddings=nothing,
    )


@pytest.mark.trial(49)
def test_adapters_of_the_command_line_count_with_their_weights() -> None:
    """SGLang gives an adapter of one name and path the same id at every start."""
    sets = [
        [],
        [adapter()],
        [adapter(seed=1)],
        [adapter(scaling=2.0)],
        [adapter(), adapter(uid="two")],
    ]
    hashes = [weights_hash(model(), CONFIG, adapters) for adapters in sets]
    assert len(set(hashes)) == len(sets)
    assert weights_hash(model(), CONFIG, reversed(sets[-1])) == hashes[-1]


def test_an_adapter_that_is_loaded_later_has_an_id_of_its_own() -> None:
    lasting = LoRARef(LoRARef.deterministic_id("a", "/a"), "a", "/a")
    later, again = (LoRARef(lora_name="b", lora_path="/b") for _ in range(2))
    assert later.lora_id != again.lora_id
    refs = {ref.lora_id: ref for ref in (lasting, later)}
    manager = SimpleNamespace(lora_refs=refs, loras={name: f"adapter {name}" for name in refs})
    assert lasting_adapters(manager) == [f"adapter {lasting.lora_id}"]
    assert lasting_adapters(None) == []


def test_sglang_keeps_adapters_where_they_are_looked_for() -> None:
    """Fails when SGLang changes: then see what an adapter of that release holds."""
    names = LoRAAdapter.__init__.__code__.co_names
    assert {"uid", "scaling", "layers", "embedding_layers", "added_tokens_embeddings"} <= {*names}

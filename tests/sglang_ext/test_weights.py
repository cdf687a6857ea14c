"""What identifies a model's pages: every weight, the configuration, the scales; not its name."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.weights import kv_scales, weights_hash

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

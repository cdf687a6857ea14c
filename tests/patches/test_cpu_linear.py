"""Linear layers by choice: equal to torch's, bounded in memory, and never stale after an update."""

import pytest
import torch
from torch.nn.functional import linear

pytest.importorskip("sglang")

from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)
from sglang.srt.model_loader.loader import DefaultModelLoader

from sglang_ext.patches import cpu_linear
from sglang_ext.patches.cpu_linear import Choice, Linears, speed_up_linears


class Layer(torch.nn.Module):
    def __init__(self, out: int, into: int, method: object, dtype: torch.dtype) -> None:
        super().__init__()
        weight = torch.randn(out, into, generator=torch.Generator().manual_seed(out)).to(dtype)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.quant_method = method


class Model(torch.nn.Module):
    """A layer, an embedding that is not a head, and a head."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.layer = Layer(48, 64, UnquantizedLinearMethod(), dtype)
        self.other = Layer(48, 64, UnquantizedEmbeddingMethod(), dtype)
        self.lm_head = Layer(96, 64, UnquantizedEmbeddingMethod(), dtype)

    def apply_to(self, name: str, x: torch.Tensor) -> torch.Tensor:
        layer = getattr(self, name)
        return layer.quant_method.apply(layer, x)


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


def force(monkeypatch: pytest.MonkeyPatch, few: str, many: str) -> None:
    monkeypatch.setattr(cpu_linear, "choose_ways", lambda weight: Choice(few, many))


def assert_current(model: Model) -> None:
    """Each layer answers from the weights that it has now."""
    for name in ("layer", "lm_head"):
        for count in (1, 200):
            expected = linear(rows(count).float(), getattr(model, name).weight.float())
            found = model.apply_to(name, rows(count)).float()
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=0.15)


@pytest.mark.parametrize("few", cpu_linear.WAYS)
@pytest.mark.parametrize("many", cpu_linear.WAYS)
def test_every_way_equals_torchs(monkeypatch: pytest.MonkeyPatch, few: str, many: str) -> None:
    force(monkeypatch, few, many)
    model = Model()
    speed_up_linears(model)
    assert_current(model)


def test_a_bias_and_more_dimensions(monkeypatch: pytest.MonkeyPatch) -> None:
    for way in cpu_linear.WAYS:
        force(monkeypatch, way, way)
        model = Model()
        speed_up_linears(model)
        x, bias = rows(6).view(2, 3, 64), torch.arange(48).bfloat16()
        found = model.layer.quant_method.apply(model.layer, x, bias)
        expected = linear(x.float(), model.layer.weight.float(), bias.float())
        torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=0.15)
        assert model.apply_to("layer", rows(1)[:0]).shape == (0, 48)


def test_only_layers_that_it_knows_are_changed() -> None:
    model = Model()
    speed_up_linears(model)
    assert type(model.other.quant_method) is UnquantizedEmbeddingMethod
    in_float32 = Model(torch.float32)
    speed_up_linears(in_float32)
    assert type(in_float32.layer.quant_method) is UnquantizedLinearMethod


@pytest.mark.parametrize("few, many", [("packed", "float32"), ("float32", "packed")])
def test_an_update_of_the_weights_is_seen(
    monkeypatch: pytest.MonkeyPatch, few: str, many: str
) -> None:
    """SGLang's own calls around an update, whatever way the weights come in."""
    force(monkeypatch, few, many)
    model = Model()
    linears = speed_up_linears(model)
    used = linears.used
    for _ in range(2):
        DefaultModelLoader.restore_weights_before_loading(model, torch.device("cpu"))
        for layer in (model.layer, model.lm_head):
            layer.weight.data.mul_(-0.5)
        # Requests may run between the parts of an update.
        assert_current(model)
        DefaultModelLoader.postprocess_weights(model, torch.device("cpu"))
        assert_current(model)
    assert linears.used == used


def test_copies_stay_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, "packed", "float32")
    model = Model()
    size = model.layer.weight.nbytes
    linears = Linears(budget=7 * size)
    assert linears.take(model.layer.weight) == Choice("packed", "float32")
    assert linears.used == 3 * size
    assert linears.take(model.lm_head.weight) == cpu_linear.PLAIN
    assert (linears.used, linears.left_plain) == (3 * size, 1)


def test_the_choice_is_measured_once_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.Size] = []

    def choose(weight: torch.Tensor) -> Choice:
        asked.append(weight.shape)
        return cpu_linear.PLAIN

    monkeypatch.setattr(cpu_linear, "choose_ways", choose)
    linears = Linears(budget=1)
    for shape in ((48, 64), (48, 64), (96, 64)):
        linears.take(torch.zeros(shape).bfloat16())
    assert asked == [(48, 64), (96, 64)]


def test_another_way_must_win_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(48, 64).bfloat16()
    for lead, expected in ((1.1, "packed"), (1.5, "plain")):
        times = {"plain": 1.0, "packed": lead, "float32": 9.0}
        monkeypatch.setattr(cpu_linear, "_race", lambda x, prepared, times=times: times)
        assert cpu_linear.choose_ways(weight) == Choice(expected, expected)


def test_a_real_race_has_a_winner() -> None:
    choice = cpu_linear.choose_ways(torch.randn(48, 64).bfloat16())
    assert {choice.few, choice.many} <= set(cpu_linear.WAYS)

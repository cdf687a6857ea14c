"""Calibration on a tiny model: what it learns and writes, what it costs, what it refuses."""

from functools import partial
from pathlib import Path

import pytest
import torch

from sglang_ext.calibration.measure import (
    Loss,
    Measured,
    calibrate,
    choose,
    default_text,
    split_text,
)
from sglang_ext.calibration.schemes import SCHEMES, layers_of, learn
from sglang_ext.calibration.treatment import load_model, logits_of, treated
from sglang_ext.cli import main
from sglang_ext.errors import ScalesError
from sglang_ext.tiering.quantizer import E4M3, E5M2, Format
from sglang_ext.tiering.scales import checkpoint_hash, load_scales
from tests.tiny_models import tiny_llama, tiny_mla

_TOKENS = 2048


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def measured(model: Path) -> Measured:
    return calibrate(model, default_text(), tokens=_TOKENS, format=None)


def test_every_format_and_scheme_is_measured(measured: Measured) -> None:
    assert [(loss.format, loss.scheme) for loss in measured.losses] == [
        (format, scheme) for format in (E4M3, E5M2) for scheme in SCHEMES
    ]
    assert all(loss.low <= loss.percent <= loss.high for loss in measured.losses)
    assert all(loss.percent != 0 and loss.divergence > 0 for loss in measured.losses)
    assert measured.tokens == _TOKENS


def test_every_layer_has_channels_and_an_error_like_the_formats(measured: Measured) -> None:
    assert set(measured.scales.layers) == set(measured.layer_errors) == {0, 1}
    half_step = 2.0 ** -(measured.scales.format.mantissa_bits + 1)
    for layer in measured.scales.layers.values():
        assert layer.keys.scale.shape == layer.values.scale.shape == (2, 32)
    for errors in measured.layer_errors.values():
        assert all(half_step / 10 < error < half_step for error in errors)


def _loss(divergence: float, scheme: int = 0, format: Format = E4M3) -> Loss:
    return Loss(format, SCHEMES[scheme], 1.0, 0.0, 2.0, divergence)


def test_the_simplest_of_equals_is_chosen_and_none_that_costs_attention() -> None:
    losses = [_loss(0.52), _loss(0.5, 1), _loss(0.9, 2), _loss(0.1, -1)]
    assert choose(losses, None) == losses[0]
    losses = [_loss(0.9), _loss(0.5, 1), _loss(0.49, 2)]
    assert choose(losses, None) == losses[1]


def test_a_format_that_is_asked_for_is_chosen() -> None:
    coarse = _loss(2.0, format=E5M2)
    assert choose([_loss(0.5), coarse], E5M2) == coarse


def test_a_short_text_is_refused(model: Path) -> None:
    with pytest.raises(ScalesError, match="the text has .* tokens; calibration needs"):
        calibrate(model, "Too short.", tokens=_TOKENS, format=None)


def test_latent_rows_have_one_set_of_channels_and_a_plain_tail(tmp_path: Path) -> None:
    folder = tiny_mla(tmp_path / "mla")
    measured = calibrate(folder, default_text(), tokens=_TOKENS, format=E4M3)
    names = {loss.scheme.name for loss in measured.losses}
    assert names == {"plain cast", "mean of K and V"}
    assert all(0 < loss.divergence < 1 for loss in measured.losses)
    for errors in measured.layer_errors.values():
        assert all(0.002 < error < 0.07 for error in errors)
    model, rank = load_model(folder), 512
    statistics = learn(model, split_text(folder, default_text(), _TOKENS))
    for layer in layers_of(statistics, E4M3, SCHEMES[2]).values():
        keys, values = layer.keys, layer.values
        assert keys.scale.shape == (1, rank + 64)
        assert torch.equal(keys.scale[:, :rank], values.scale)
        assert torch.equal(keys.mean[:, :rank], values.mean)
        assert values.mean.abs().max() > 0
        assert (keys.scale[:, rank:] == 1).all() and not keys.mean[:, rank:].any()


def test_what_is_done_to_latents_reaches_the_answer(tmp_path: Path) -> None:
    """The model must read treated latents, not the ones it computed."""
    folder = tiny_mla(tmp_path / "mla")
    model, chunk = load_model(folder), split_text(folder, default_text(), _TOKENS)[0][:64]
    plain = logits_of(model, chunk)
    with treated(lambda _layer, _queries, keys, values: (keys, values)):
        assert torch.equal(logits_of(model, chunk), plain)
    for part in (slice(0, 512), slice(512, None)):
        with treated(partial(_without, part)):
            assert (logits_of(model, chunk) - plain).abs().max() > 0.1


def _without(
    part: slice, _layer: int, _queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    keys = keys.clone()
    keys[..., part] = 0
    return keys, values


def test_the_command_writes_a_file_for_these_weights(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "scales.safetensors"
    arguments = ["calibrate", "--model-path", str(model), "--out", str(out)]
    assert main([*arguments, "--tokens", str(_TOKENS), "--format", "fp8_e4m3"]) == 0
    scales = load_scales(out, weights=checkpoint_hash(model), format=E4M3)
    assert torch.isfinite(scales.layers[1].keys.mean).all()
    printed = capsys.readouterr().out
    assert "Recommended: fp8_e4m3" in printed
    assert all(scheme.name in printed for scheme in SCHEMES)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"--text": "/absent.txt"}, "/absent.txt"),
        ({"--model-path": "/absent"}, "/absent"),
        ({"--out": "/absent/scales"}, "/absent/scales"),
    ],
)
def test_wrong_input_is_an_answer_not_a_crash(
    model: Path,
    tmp_path: Path,
    change: dict[str, str],
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = {"--model-path": str(model), "--out": str(tmp_path / "scales")} | change
    flat = [word for pair in arguments.items() for word in pair]
    assert main(["calibrate", *flat, "--tokens", str(_TOKENS)]) != 0
    assert says in capsys.readouterr().err

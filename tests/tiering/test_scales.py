"""The file of FP8 scales: what was written is read, and nothing else is taken for it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_ext.errors import ScalesError
from sglang_ext.tiering.feedback import Feedback
from sglang_ext.tiering.quantizer import E4M3, E5M2, Channels
from sglang_ext.tiering.scales import (
    LayerChannels,
    Scales,
    checkpoint_hash,
    load_scales,
    save_scales,
)


def _channels(seed: int) -> Channels:
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-4, 4, (2, 8), generator=generator)
    return Channels(torch.exp2(exponents.float()), torch.randn(2, 8, generator=generator))


def _with_feedback(channels: Channels) -> Channels:
    order = torch.stack([torch.randperm(8), torch.randperm(8)])
    feedback = Feedback(order, torch.randn(2, 8, 8).triu(1))
    return Channels(channels.scale, channels.mean, feedback)


@pytest.fixture
def scales() -> Scales:
    layers = {n: LayerChannels(_channels(n), _channels(n + 100)) for n in (0, 3, 11)}
    layers[3] = LayerChannels(_with_feedback(_channels(3)), _channels(103))
    return Scales(E4M3, "toy", "abc", layers)


@pytest.fixture
def path(tmp_path: Path, scales: Scales) -> Path:
    save_scales(tmp_path / "scales.safetensors", scales)
    return tmp_path / "scales.safetensors"


def test_what_was_written_is_read(path: Path, scales: Scales) -> None:
    read = load_scales(path, weights="abc", format=E4M3)
    assert (read.format, read.model, read.weights) == (E4M3, "toy", "abc")
    assert read.layers.keys() == scales.layers.keys()
    for number, layer in scales.layers.items():
        assert torch.equal(read.layers[number].keys.scale, layer.keys.scale)
        assert torch.equal(read.layers[number].keys.mean, layer.keys.mean)
        assert torch.equal(read.layers[number].values.scale, layer.values.scale)
        assert torch.equal(read.layers[number].values.mean, layer.values.mean)
    assert read.layers[0].keys.feedback is None
    found, written = read.layers[3].keys.feedback, scales.layers[3].keys.feedback
    assert found is not None and written is not None
    assert torch.equal(found.order, written.order)
    assert torch.equal(found.spread, written.spread)


def test_writing_leaves_nothing_beside_the_file(path: Path) -> None:
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path, scales: Scales) -> None:
    with pytest.raises(ScalesError, match="could not be written"):
        save_scales(tmp_path / "absent" / "scales", scales)


@pytest.mark.trial(88)
def test_a_file_of_other_weights_or_format_is_refused(path: Path) -> None:
    with pytest.raises(ScalesError, match="made for weights abc, but the server has other"):
        load_scales(path, weights="other")
    with pytest.raises(ScalesError, match="made for format fp8_e4m3, but the server has fp8_e5m2"):
        load_scales(path, format=E5M2)


def _rewrite(path: Path, name: str, tensor: torch.Tensor | None) -> None:
    tensors = load_file(path)
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    metadata = {"sglang_ext_scales": "2", "format": "fp8_e4m3", "model": "toy", "weights": "abc"}
    save_file(tensors, path, metadata)


@pytest.mark.parametrize(
    ("name", "tensor", "says"),
    [
        ("layers.3.key.scale", None, "layers.3.key.scale"),
        ("layers.3.key.scale", torch.full((2, 8), 3.0), "no power of two"),
        ("layers.3.key.scale", torch.zeros(2, 8), "no power of two"),
        ("layers.3.key.mean", torch.full((2, 8), torch.nan), "not finite"),
        ("layers.3.key.mean", torch.zeros(2, 4), "shapes"),
        ("layers.3.key.order", None, "layers.3.key.order"),
        ("layers.3.key.spread", None, "layers.3.key.spread"),
        ("layers.3.key.order", torch.zeros(2, 8, dtype=torch.int64), "misses a channel"),
        ("layers.3.key.order", torch.arange(8).unsqueeze(0), "another shape"),
        ("layers.3.key.spread", torch.zeros(2, 8, 4), "another shape"),
        ("layers.3.key.spread", torch.full((2, 8, 8), torch.nan), "not finite"),
        ("layers.3.key.spread", torch.ones(2, 8, 8), "already rounded"),
        ("layers.x.key.mean", torch.zeros(2, 8), "damaged"),
        ("other", torch.zeros(1), "damaged"),
    ],
)
def test_a_damaged_file_is_refused(
    path: Path, name: str, tensor: torch.Tensor | None, says: str
) -> None:
    _rewrite(path, name, tensor)
    with pytest.raises(ScalesError, match=says):
        load_scales(path)


def test_what_is_no_file_of_scales_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScalesError, match="not a readable"):
        load_scales(tmp_path / "absent")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ScalesError, match="not a readable"):
        load_scales(tmp_path / "text")
    save_file({"a": torch.zeros(1)}, tmp_path / "weights")
    with pytest.raises(ScalesError, match="not a file of FP8 scales"):
        load_scales(tmp_path / "weights")


def test_the_hash_sees_every_byte_of_the_weights_and_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").write_bytes(bytes(100))
    hashes = {checkpoint_hash(tmp_path)}
    assert checkpoint_hash(tmp_path) in hashes
    (tmp_path / "b.safetensors").write_bytes(bytes(99) + b"\1")
    hashes.add(checkpoint_hash(tmp_path))
    (tmp_path / "b.safetensors").rename(tmp_path / "c.safetensors")
    hashes.add(checkpoint_hash(tmp_path))
    (tmp_path / "config.json").write_text("{ }")
    hashes.add(checkpoint_hash(tmp_path))
    assert len(hashes) == 4


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScalesError, match="no \\*.safetensors"):
        checkpoint_hash(tmp_path)

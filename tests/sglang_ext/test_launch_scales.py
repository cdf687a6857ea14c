"""Scales named by the policy are handed over only where they fit model, flags and platform."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.errors import ScalesError, UnsupportedError
from sglang_ext.launch_scales import use_scales
from sglang_ext.tenancy.policy import EnginePolicy, Policy
from sglang_ext.tiering import scales_in_force
from sglang_ext.tiering.quantizer import E4M3, Channels
from sglang_ext.tiering.scales import LayerChannels, Scales, checkpoint_hash, save_scales


@pytest.fixture(autouse=True)
def _no_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (scales_in_force.SCALES_VARIABLE, scales_in_force.DIGEST_VARIABLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


@pytest.fixture
def path(model: Path) -> Path:
    channels = Channels.neutral(4, 8)
    layers = {0: LayerChannels(channels, channels)}
    save_scales(model / "scales", Scales(E4M3, "toy", checkpoint_hash(model), layers))
    return model / "scales"


def _policy(path: Path | None) -> Policy:
    return Policy(tenants={}, engine=EnginePolicy(kv_scales=path))


def _args(model: Path, **changes: Any) -> Any:
    fields = {
        "model_path": str(model),
        "kv_cache_dtype": "fp8_e4m3",
        "attention_backend": "sglang_ext_cpu",
    }
    return SimpleNamespace(**fields | changes)


def test_scales_that_fit_reach_every_process(model: Path, path: Path) -> None:
    use_scales(_policy(path), _args(model), on_cpu=True)
    found = scales_in_force.scales_in_force()
    assert found is not None
    assert found.layers.keys() == {0}
    assert scales_in_force.scales_digest()


def test_on_a_gpu_flashinfer_over_pages_reads_them(model: Path, path: Path) -> None:
    arguments = _args(model, attention_backend="sglang_ext_flashinfer")
    use_scales(_policy(path), arguments, on_cpu=False)
    assert scales_in_force.scales_in_force() is not None


def test_without_scales_there_is_nothing_to_hand_over(model: Path) -> None:
    use_scales(_policy(None), _args(model), on_cpu=False)
    assert scales_in_force.scales_in_force() is None
    assert scales_in_force.scales_digest() == ""


@pytest.mark.trial(88)
@pytest.mark.parametrize(
    ("changes", "on_cpu", "says"),
    [
        ({}, False, "only the attention sglang_ext_flashinfer reads"),
        ({"attention_backend": "torch_native"}, True, "only the attention sglang_ext_cpu reads"),
        ({"attention_backend": "sglang_ext_flashinfer"}, True, "only the attention sglang_ext_cpu"),
        ({"kv_cache_dtype": "auto"}, True, "set engine.kv_cache_dtype to one of fp8_e4m3, fp8_e5"),
        ({"model_path": "some/hub-name"}, True, "give --model-path as a folder"),
    ],
)
def test_scales_that_nobody_would_read_are_refused(
    model: Path, path: Path, changes: dict[str, str], on_cpu: bool, says: str
) -> None:
    with pytest.raises(UnsupportedError, match=says):
        use_scales(_policy(path), _args(model, **changes), on_cpu=on_cpu)


@pytest.mark.trial(88)
def test_scales_of_another_model_or_format_are_refused(model: Path, path: Path) -> None:
    with pytest.raises(ScalesError, match="format"):
        use_scales(_policy(path), _args(model, kv_cache_dtype="fp8_e5m2"), on_cpu=True)
    (model / "model.safetensors").write_bytes(b"other")
    with pytest.raises(ScalesError, match="weights"):
        use_scales(_policy(path), _args(model), on_cpu=True)


def test_a_file_that_changes_while_the_server_starts_stops_it(model: Path, path: Path) -> None:
    use_scales(_policy(path), _args(model), on_cpu=True)
    channels = Channels(torch.full((4, 8), 2.0), torch.zeros(4, 8))
    save_scales(path, Scales(E4M3, "toy", "x", {0: LayerChannels(channels, channels)}))
    with pytest.raises(ScalesError, match="changed while the server was starting"):
        scales_in_force.scales_in_force()


def test_a_rank_holds_its_share_of_the_heads() -> None:
    channels = Channels(torch.exp2(torch.arange(4.0)).repeat(8, 1).T, torch.zeros(4, 8))
    scales = Scales(E4M3, "toy", "x", {0: LayerChannels(channels, channels)})

    def heads(rank: int, ranks: int) -> list[float]:
        kept: torch.Tensor = scales.of_rank(rank, ranks).layers[0].keys.scale[:, 0]
        return kept.tolist()

    assert heads(0, 1) == [1, 2, 4, 8]
    assert [heads(rank, 2) for rank in range(2)] == [[1, 2], [4, 8]]
    assert [heads(rank, 8) for rank in range(8)] == [[n] for n in (1, 1, 2, 2, 4, 4, 8, 8)]

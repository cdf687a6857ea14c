"""FP8 pages with calibrated channels in the real engine, cold and on prefix hits (trial 90)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sglang_ext.errors import ScalesError
from sglang_ext.patches.cpu_attention import CPU_ATTENTION
from sglang_ext.patches.cpu_fp8_pages import fp8_layers
from sglang_ext.tiering import scales_in_force
from sglang_ext.tiering.feedback import learn_feedback
from sglang_ext.tiering.quantizer import E4M3, FORMATS, Channels
from sglang_ext.tiering.scales import LayerChannels, Scales, save_scales
from tests.patches.test_cpu_attention import answers, differences, engine, random_prompts
from tests.tiny_models import tiny_llama, tiny_mla

# The largest difference of one log probability that FP8 explains on these models, and the mean.
_AWAY = {"fp8_e4m3": (1.0, 0.2), "fp8_e5m2": (2.0, 0.4)}
_LAYERS = 2
_LATENT_RANK, _LATENT_TAIL = 512, 64


def _channels(seed: int, heads: int, dim: int) -> Channels:
    """Scales and means far from neutral: whoever forgets to fold one is far off."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-5, -1, (heads, dim), generator=generator)
    return Channels(torch.exp2(exponents.float()), torch.randn(heads, dim, generator=generator) / 2)


def _with_feedback(channels: Channels) -> Channels:
    heads, dim = channels.scale.shape
    generator = torch.Generator().manual_seed(7)
    queries = torch.randn(heads, 3 * dim, dim, generator=generator)
    moment, power = queries.transpose(1, 2) @ queries, torch.ones(heads, dim)
    feedback = learn_feedback(moment, channels.scale, power)
    return Channels(channels.scale, channels.mean, feedback)


def _of_heads(layer: int) -> LayerChannels:
    return LayerChannels(_with_feedback(_channels(layer, 2, 32)), _channels(layer + 10, 2, 32))


def _of_latents(layer: int) -> LayerChannels:
    rows = _channels(layer, 1, _LATENT_RANK + _LATENT_TAIL)
    values = Channels(rows.scale[:, :_LATENT_RANK], rows.mean[:, :_LATENT_RANK])
    return LayerChannels(rows, values)


@dataclass(frozen=True)
class _Kind:
    """A kind of model, and the channels of each of its layers."""

    build: Callable[[Path], Path]
    channels: Callable[[int], LayerChannels]


_KINDS = {"heads": _Kind(tiny_llama, _of_heads), "latents": _Kind(tiny_mla, _of_latents)}


def _hand_over(
    layers: Mapping[int, LayerChannels],
    format: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = folder / "scales.safetensors"
    save_scales(path, Scales(FORMATS[format], "tiny", "unchecked", layers))
    for name in (scales_in_force.SCALES_VARIABLE, scales_in_force.DIGEST_VARIABLE):
        monkeypatch.setenv(name, "")
    scales_in_force.hand_over(path)


@pytest.mark.serving
@pytest.mark.trial(90)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", _KINDS.values(), ids=_KINDS)
def test_answers_stay_those_of_the_model_cold_and_on_hits(
    kind: _Kind, format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = {number: kind.channels(number) for number in range(_LAYERS)}
    _hand_over(layers, format, tmp_path, monkeypatch)
    model, prompts = kind.build(tmp_path / "model"), random_prompts()
    flags = {"attention_backend": CPU_ATTENTION, "kv_cache_dtype": format}
    with engine(model, **flags) as running:
        cold, hits = answers(running, prompts, 8), answers(running, prompts, 8)
    assert [answer["cached_tokens"] for answer in hits] == [224, 0, 240, 80]
    reference = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    worst, mean = _AWAY[format]
    for found in (cold, hits):
        pairs = zip(prompts, found, strict=True)
        away = [value for pair in pairs for value in differences(reference, *pair)]
        print(f"worst {max(away):.3f}, mean {sum(away) / len(away):.4f}")
        assert max(away) < worst
        assert sum(away) / len(away) < mean


def _latent_runner() -> Any:
    config = SimpleNamespace(
        hf_text_config=SimpleNamespace(),
        kv_lora_rank=_LATENT_RANK,
        qk_rope_head_dim=_LATENT_TAIL,
        num_attention_heads=4,
    )
    return SimpleNamespace(
        token_to_kv_pool=SimpleNamespace(dtype=torch.float8_e4m3fn),
        is_draft_worker=False,
        use_mla_backend=True,
        model_config=config,
    )


@pytest.mark.trial(88)
def test_without_scales_the_log_names_the_defaults(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(scales_in_force.SCALES_VARIABLE, raising=False)
    assert fp8_layers(_latent_runner()) == {}
    assert "fp8_e4m3 pages without calibrated scales: scale 1, mean 0" in caplog.text


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (_of_heads(0), "heads and channels of K and V, the model"),
        (
            LayerChannels(_of_latents(0).keys, _of_latents(1).values),
            "other channels for V than for K",
        ),
    ],
)
def test_scales_that_no_latent_row_can_have_are_refused(
    layer: LayerChannels, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _hand_over({0: layer}, E4M3.name, tmp_path, monkeypatch)
    with pytest.raises(ScalesError, match=says):
        fp8_layers(_latent_runner())


@pytest.mark.serving
def test_the_same_memory_holds_nearly_twice_the_tokens(tmp_path: Path) -> None:
    """Each engine sizes its pool from the memory that is free, which other programs change."""
    model, tokens = tiny_llama(tmp_path / "model"), {}
    for dtype in ("auto", "fp8_e4m3"):
        with engine(
            model,
            attention_backend=CPU_ATTENTION,
            kv_cache_dtype=dtype,
            max_total_tokens=None,
            mem_fraction_static=0.1,
        ) as running:
            tokens[dtype] = running.get_server_info()["max_total_num_tokens"]
    assert tokens["fp8_e4m3"] > 1.6 * tokens["auto"]

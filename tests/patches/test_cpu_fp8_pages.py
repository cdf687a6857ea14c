"""FP8 pages with calibrated channels in the real engine, cold and on prefix hits (trial 90)."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from sglang_ext.patches.cpu_attention import CPU_ATTENTION
from sglang_ext.tiering import scales_in_force
from sglang_ext.tiering.feedback import learn_feedback
from sglang_ext.tiering.quantizer import FORMATS, Channels
from sglang_ext.tiering.scales import LayerChannels, Scales, save_scales
from tests.patches.test_cpu_attention import answers, differences, engine, random_prompts
from tests.tiny_models import tiny_llama

# The largest difference of one log probability that FP8 explains on this model, and the mean.
_AWAY = {"fp8_e4m3": (1.0, 0.2), "fp8_e5m2": (2.0, 0.4)}
_HEADS, _DIM, _LAYERS = 2, 32, 2


def _channels(seed: int) -> Channels:
    """Scales and means far from neutral: whoever forgets to fold one is far off."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-5, -1, (_HEADS, _DIM), generator=generator)
    return Channels(
        torch.exp2(exponents.float()), torch.randn(_HEADS, _DIM, generator=generator) / 2
    )


def _with_feedback(channels: Channels) -> Channels:
    generator = torch.Generator().manual_seed(7)
    queries = torch.randn(_HEADS, 3 * _DIM, _DIM, generator=generator)
    moment, power = queries.transpose(1, 2) @ queries, torch.ones(_HEADS, _DIM)
    feedback = learn_feedback(moment, channels.scale, power)
    return Channels(channels.scale, channels.mean, feedback)


@pytest.fixture(params=FORMATS)
def scaled(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    layers = {
        number: LayerChannels(_with_feedback(_channels(number)), _channels(number + 10))
        for number in range(_LAYERS)
    }
    path = tmp_path / "scales.safetensors"
    save_scales(path, Scales(FORMATS[request.param], "tiny", "unchecked", layers))
    for name in (scales_in_force.SCALES_VARIABLE, scales_in_force.DIGEST_VARIABLE):
        monkeypatch.setenv(name, "")
    scales_in_force.hand_over(path)
    yield request.param


@pytest.mark.serving
@pytest.mark.trial(90)
def test_answers_stay_those_of_the_model_cold_and_on_hits(scaled: str, tmp_path: Path) -> None:
    model, prompts = tiny_llama(tmp_path / "model"), random_prompts()
    flags = {"attention_backend": CPU_ATTENTION, "kv_cache_dtype": scaled}
    with engine(model, **flags) as running:
        cold, hits = answers(running, prompts, 8), answers(running, prompts, 8)
    assert [answer["cached_tokens"] for answer in hits] == [224, 0, 240, 80]
    reference = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    worst, mean = _AWAY[scaled]
    for found in (cold, hits):
        pairs = zip(prompts, found, strict=True)
        away = [value for pair in pairs for value in differences(reference, *pair)]
        assert max(away) < worst
        assert sum(away) / len(away) < mean


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

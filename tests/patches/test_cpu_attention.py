"""The CPU attention backend in SGLang's own engine: against transformers, and against torch_native.

Log probabilities are compared, not only tokens, on prompts of mixed lengths, first computed in full
and then again from the cache.
"""

import atexit
import random
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_ext.demo_model import demo_model_path
from sglang_ext.errors import UnsupportedError
from sglang_ext.patches.cpu_attention import CPU_ATTENTION
from sglang_ext.patches.cpu_attention_backend import CpuAttentionBackend
from tests import tiny_models

pytest.importorskip("sglang")

_NEW_TOKENS = 12
# The largest difference of one log probability, and the mean over all, that bfloat16 explains.
_WORST, _MEAN = 0.12, 0.025

_PLACES = ("France", "Japan", "Egypt", "Brazil", "Canada", "Kenya", "India", "Peru", "Iran", "Cuba")
_FORMS = (
    "The capital of {} is",
    "A traveller who comes to {} for the first time should know that",
    "Question: which languages are spoken in {}?\nAnswer:",
    "Here is a short history of {}. In the beginning",
    "Three dishes that everybody in {} cooks at home:\n1.",
)


@dataclass(frozen=True)
class Kind:
    """One kind of attention: what makes the model, and how far SGLang may be off."""

    build: Callable[[Path], Path]
    flags: dict[str, Any] = field(default_factory=dict)
    worst: float = _WORST
    mean: float = _MEAN


_KINDS = {
    "llama": Kind(tiny_models.tiny_llama),
    "sliding window": Kind(tiny_models.tiny_sliding_window),
    "soft cap": Kind(tiny_models.tiny_softcap),
    "mla": Kind(tiny_models.tiny_mla),
    # In bfloat16 two experts can tie, and another choice of expert is no small difference.
    "mixture of experts": Kind(
        tiny_models.tiny_moe, flags={"dtype": "float32"}, worst=1e-3, mean=1e-4
    ),
    "e4m3 pages": Kind(
        tiny_models.tiny_llama, flags={"kv_cache_dtype": "fp8_e4m3"}, worst=1.0, mean=0.2
    ),
    "e5m2 pages": Kind(
        tiny_models.tiny_llama, flags={"kv_cache_dtype": "fp8_e5m2"}, worst=2.0, mean=0.4
    ),
    "mla, e5m2 pages": Kind(
        tiny_models.tiny_mla, flags={"kv_cache_dtype": "fp8_e5m2"}, worst=2.0, mean=0.4
    ),
}


@contextmanager
def engine(model: Path, **flags: Any) -> Iterator[Any]:
    """Run SGLang in processes of its own, small and quiet."""
    import sglang

    running = sglang.Engine(
        model_path=str(model),
        device="cpu",
        page_size=16,
        max_running_requests=8,
        context_length=2048,
        skip_tokenizer_init=True,
        log_level="warning",
        **{"max_total_tokens": 8192, **flags},
    )
    try:
        yield running
    finally:
        running.shutdown()
        # Not again at the end of the run, where its log lines would bury what failed.
        atexit.unregister(running.shutdown)


def random_prompts() -> list[list[int]]:
    """Four prompts of mixed lengths; two share their first 150 tokens."""
    draw = random.Random(0)
    tokens = [draw.randrange(10, 49000) for _ in range(500)]
    return [tokens[:240], tokens[240:253], tokens[:150] + tokens[300:400], tokens[400:490]]


def answers(running: Any, prompts: list[list[int]], new_tokens: int) -> list[dict[str, Any]]:
    """Greedy answers with the five best log probabilities of every token."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    found = running.generate(
        input_ids=prompts, sampling_params=sampling, return_logprob=True, top_logprobs_num=5
    )
    return [each["meta_info"] for each in found]


def tokens_of(answer: dict[str, Any]) -> list[int]:
    return [token for _, token, *_ in answer["output_token_logprobs"]]


def differences(reference: Any, prompt: list[int], answer: dict[str, Any]) -> list[float]:
    """How far every reported log probability is from the reference model's."""
    tokens = tokens_of(answer)
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + tokens])).logits[0]
    expected = logits.float().log_softmax(-1)[len(prompt) - 1 :]
    return [
        abs(value - expected[position, token].item())
        for position, best in enumerate(answer["output_top_logprobs"])
        for value, token, *_ in best
    ]


@pytest.mark.serving
@pytest.mark.parametrize("name", _KINDS)
def test_log_probabilities_equal_transformers_cold_and_on_hits(name: str, tmp_path: Path) -> None:
    kind, prompts = _KINDS[name], random_prompts()
    model = kind.build(tmp_path / "model")
    with engine(model, attention_backend=CPU_ATTENTION, **kind.flags) as running:
        cold = answers(running, prompts, _NEW_TOKENS)
        hits = answers(running, prompts, _NEW_TOKENS)
    assert [answer["cached_tokens"] for answer in hits] == [224, 0, 240, 80]
    # transformers' fused attention leaves the soft cap out.
    reference = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    for found in (cold, hits):
        pairs = zip(prompts, found, strict=True)
        away = [value for pair in pairs for value in differences(reference, *pair)]
        assert max(away) < kind.worst
        assert sum(away) / len(away) < kind.mean


@pytest.mark.serving
def test_fifty_greedy_answers_are_as_near_to_float32_as_those_of_torch_native() -> None:
    """All parts of the CPU engine together: attention, linear layers, norm, activation, rotary.

    How far torch_native's log probabilities are from float32's is what bfloat16 costs. Ours may not
    be further away. Two answers may part where bfloat16 cannot tell two tokens apart.
    """
    model = demo_model_path()
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [tokenizer(form.format(place))["input_ids"] for form in _FORMS for place in _PLACES]
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found, away = {}, {}
    for backend in (CPU_ATTENTION, "torch_native"):
        with engine(model, attention_backend=backend) as running:
            found[backend] = answers(running, prompts, _NEW_TOKENS)
        pairs = zip(prompts, found[backend], strict=True)
        away[backend] = sorted(value for pair in pairs for value in differences(reference, *pair))
    same = sum(map(_same, found[CPU_ATTENTION], found["torch_native"]))
    ours, theirs = (statistics.fmean(away[name]) for name in (CPU_ATTENTION, "torch_native"))
    worst, their_worst = (away[name][-1] for name in (CPU_ATTENTION, "torch_native"))
    said = (
        f"{same} of 50 equal; mean {ours:.4f} / {theirs:.4f}, worst {worst:.3f} / {their_worst:.3f}"
    )
    print(said)
    assert ours <= 1.1 * theirs, said
    assert worst <= 1.5 * their_worst, said
    assert same >= 30, said


def _same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return tokens_of(ours) == tokens_of(theirs)


def _runner(*, encoder: bool = False) -> Any:
    return SimpleNamespace(
        device="cpu",
        model_config=SimpleNamespace(is_encoder_decoder=encoder),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(2, 8, dtype=torch.int32)),
        token_to_kv_pool=SimpleNamespace(dtype=torch.float32),
        dtype=torch.float32,
        use_mla_backend=False,
    )


def test_encoder_decoder_models_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="cross attention"):
        CpuAttentionBackend(_runner(encoder=True))


@pytest.mark.parametrize(
    "layer, options, said",
    [
        ({"is_cross_attention": True}, {}, "not causal self-attention"),
        ({"attn_type": "encoder_only"}, {}, "not causal self-attention"),
        ({}, {"sinks": torch.ones(2)}, "sinks"),
    ],
)
def test_what_it_cannot_compute_is_refused(
    layer: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    from sglang.srt.layers.radix_attention import RadixAttention

    built = RadixAttention(2, 16, 0.25, 1, 0)
    for name, value in layer.items():
        setattr(built, name, value)
    row = torch.zeros(1, 32)
    with pytest.raises(UnsupportedError, match=said):
        CpuAttentionBackend(_runner()).forward_extend(
            row, None, None, built, SimpleNamespace(), **options
        )

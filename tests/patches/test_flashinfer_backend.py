"""The backend over real pages, on SGLang's own pools: what it stores, plans, calls and folds.

FlashInfer's kernels are replaced by float32 arithmetic behind its own signatures; the expected
answers are float64 over what the pages stand for. No GPU has run this yet.
"""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("flashinfer")

from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_ext.errors import UnsupportedError
from sglang_ext.patches import cpu_fp8_pages, flashinfer_backend, flashinfer_pages
from sglang_ext.patches.cpu_platform_class import ExtCpuPlatform
from sglang_ext.patches.flashinfer_backend import FlashInferPagesBackend
from sglang_ext.tiering import scales_in_force
from sglang_ext.tiering.feedback import learn_feedback
from sglang_ext.tiering.quantizer import FORMATS, Channels, Quantized, dequantize, quantize
from sglang_ext.tiering.scales import LayerChannels, Scales, save_scales
from tests.patches.flashinfer_fake import FakeFlashInfer

_PAGE, _PAGES, _LINES, _CONTEXT = 16, 40, 6, 96
_QUERY_HEADS, _KV_HEADS, _DIM, _RANK, _TAIL = 6, 2, 64, 128, 64
_SCALE = 0.11
_E4M3, _E5M2, _BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = SimpleNamespace(attn_tp_rank=0, attn_tp_size=1, dcp_enabled=False, attn_dcp_size=1)
    for module in (cpu_fp8_pages, flashinfer_backend, memory_pool):
        monkeypatch.setattr(module, "get_parallel", lambda: alone)
    for name in (scales_in_force.SCALES_VARIABLE, scales_in_force.DIGEST_VARIABLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def _runner(*, latent: bool, dtype: torch.dtype, **changes: Any) -> Any:
    size = _PAGE * _PAGES
    pool = (
        MLATokenToKVPool(size, _PAGE, dtype, _RANK, _TAIL, 1, "cpu", False)
        if latent
        else MHATokenToKVPool(size, _PAGE, dtype, _KV_HEADS, _DIM, 1, "cpu", False)
    )
    config = SimpleNamespace(
        is_encoder_decoder=False,
        hf_text_config=SimpleNamespace(),
        context_len=_CONTEXT,
        num_attention_heads=_QUERY_HEADS,
        head_dim=_DIM,
        kv_lora_rank=_RANK,
        qk_rope_head_dim=_TAIL,
        scaling=_SCALE,
        get_num_kv_heads=lambda ranks: _KV_HEADS,
        get_total_num_kv_heads=lambda: _KV_HEADS,
    )
    pages = 1 + torch.randperm(_PAGES, generator=torch.Generator().manual_seed(3))
    slots = pages.unsqueeze(1) * _PAGE + torch.arange(_PAGE)
    table = slots.flatten()[: _LINES * _CONTEXT].view(_LINES, _CONTEXT).int()
    fields = {
        "device": "cpu",
        "dtype": _BF16,
        "page_size": _PAGE,
        "use_mla_backend": latent,
        "is_draft_worker": False,
        "sliding_window_size": None,
        "spec_algorithm": SpeculativeAlgorithm.NONE,
        "model_config": config,
        "req_to_token_pool": SimpleNamespace(req_to_token=table),
        "token_to_kv_pool": pool,
    }
    return SimpleNamespace(**fields | changes)


def _channels(seed: int, heads: int, dim: int) -> Channels:
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-5, -1, (heads, dim), generator=generator)
    return Channels(torch.exp2(exponents.float()), torch.randn(heads, dim, generator=generator))


def _calibrated(latent: bool) -> LayerChannels:
    if latent:
        rows = _channels(1, 1, _RANK + _TAIL)
        return LayerChannels(rows, Channels(rows.scale[:, :_RANK], rows.mean[:, :_RANK]))
    keys = _channels(1, _KV_HEADS, _DIM)
    queries = torch.randn(_KV_HEADS, 200, _DIM, generator=torch.Generator().manual_seed(7))
    feedback = learn_feedback(
        queries.transpose(1, 2) @ queries, keys.scale, torch.ones(_KV_HEADS, _DIM)
    )
    return LayerChannels(Channels(keys.scale, keys.mean, feedback), _channels(2, _KV_HEADS, _DIM))


class _Model:
    """One attention layer, the texts of some requests, and what their answers should be."""

    def __init__(self, runner: Any, scales: LayerChannels | None) -> None:
        self.runner, self.latent = runner, runner.use_mla_backend
        self.backend = FlashInferPagesBackend(runner, FakeFlashInfer)
        width = _RANK + _TAIL if self.latent else _DIM
        self.kv_heads, self.value_width = (1, _RANK) if self.latent else (_KV_HEADS, _DIM)
        self.layer = RadixAttention(
            _QUERY_HEADS, width, _SCALE, self.kv_heads, 0, v_head_dim=self.value_width
        )
        generator = torch.Generator().manual_seed(11)
        self.queries, self.keys, self.values = (
            torch.randn(_LINES, _CONTEXT, heads, width, generator=generator).to(_BF16)
            for heads in (_QUERY_HEADS, self.kv_heads, self.kv_heads)
        )
        if self.latent:
            self.values = self.keys[..., :_RANK]
        neutral = [Channels.neutral(self.kv_heads, each) for each in (width, self.value_width)]
        self._scales = scales or LayerChannels(*neutral)

    def step(
        self,
        lines: Sequence[int],
        cached: Sequence[int],
        lengths: Sequence[int],
        captured: bool | None = None,
    ) -> float:
        """Run tokens ``[cached, length)`` of each request; return how far the answer is off.

        ``captured``: None for an eager step; else a CUDA graph's, and whether it is captured now.
        """
        rows = [
            (line, at)
            for line, old, new in zip(lines, cached, lengths, strict=True)
            for at in range(old, new)
        ]
        batch = self._batch(lines, cached, lengths, rows)
        if captured is None:
            self.backend.init_forward_metadata(batch)
        else:
            self.backend.init_forward_metadata_out_graph(batch, in_capture=captured)
        pick = tuple(torch.tensor(rows).T)
        query, keys, values = (each[pick] for each in (self.queries, self.keys, self.values))
        found = self.backend.forward(query.flatten(1), keys, values, self.layer, batch)
        assert found.dtype == _BF16
        expected = torch.stack([self._answer(line, at) for line, at in rows])
        return float((found.double() - expected).abs().max())

    def _batch(
        self,
        lines: Sequence[int],
        cached: Sequence[int],
        lengths: Sequence[int],
        rows: Sequence[tuple[int, int]],
    ) -> Any:
        table = self.runner.req_to_token_pool.req_to_token
        decodes = all(new - old == 1 for old, new in zip(cached, lengths, strict=True))
        return SimpleNamespace(
            forward_mode=ForwardMode.DECODE if decodes else ForwardMode.EXTEND,
            batch_size=len(lines),
            req_pool_indices=torch.tensor(lines),
            seq_lens=torch.tensor(lengths),
            seq_lens_cpu=torch.tensor(lengths),
            extend_seq_lens_cpu=[new - old for old, new in zip(cached, lengths, strict=True)],
            out_cache_loc=torch.tensor([int(table[row]) for row in rows]),
            out_cache_loc_is_physical=False,
        )

    def _answer(self, line: int, at: int) -> torch.Tensor:
        """Attention of one row over what the pages of its text stand for, float64."""
        keys = self._stored(self.keys[line, : at + 1], self._scales.keys)
        values = self._stored(self.values[line, : at + 1], self._scales.values)
        if self.latent:
            values = keys[..., :_RANK]
        group = _QUERY_HEADS // self.kv_heads
        keys, values = (each.repeat_interleave(group, dim=1) for each in (keys, values))
        logits = torch.einsum("hd,thd->ht", self.queries[line, at].double(), keys) * _SCALE
        return torch.einsum("ht,thd->hd", logits.softmax(dim=-1), values).flatten()

    def _stored(self, rows: torch.Tensor, channels: Channels) -> torch.Tensor:
        dtype = self.runner.token_to_kv_pool.dtype
        format = next((format for format in FORMATS.values() if format.dtype is dtype), None)
        if format is None:
            return rows.double()
        codes = quantize(rows, channels, format).codes
        return dequantize(Quantized(codes, None), channels).double()


@pytest.fixture(
    params=[
        (False, _BF16, False),
        (False, _E4M3, False),
        (False, _E4M3, True),
        (False, _E5M2, True),
        (True, _BF16, False),
        (True, _E4M3, False),
        (True, _E4M3, True),
    ],
    ids=lambda case: f"{'latent' if case[0] else 'heads'}-{str(case[1])[6:]}-{case[2]}",
)
def model(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> _Model:
    latent, dtype, calibrated = request.param
    scales = _calibrated(latent) if calibrated else None
    if scales is not None:
        format = next(format for format in FORMATS.values() if format.dtype is dtype)
        path = tmp_path / "scales.safetensors"
        save_scales(path, Scales(format, "toy", "unchecked", {0: scales}))
        scales_in_force.hand_over(path)
    return _Model(_runner(latent=latent, dtype=dtype), scales)


# Queries, weights and outputs are rounded to bfloat16.
_CLOSE = 0.03


@pytest.mark.trial(90)
@pytest.mark.trial(91)
def test_prefill_hits_and_decode_are_attention_over_the_pages(model: _Model) -> None:
    assert model.step([4, 1], [0, 0], [33, 16]) < _CLOSE
    assert model.step([1, 2, 4], [16, 0, 33], [50, 7, 40]) < _CLOSE
    assert model.step([4, 2, 1], [40, 7, 50], [41, 8, 51]) < _CLOSE


def test_a_captured_step_is_planned_anew_into_the_same_buffers(model: _Model) -> None:
    model.step([4, 1, 5], [0, 0, 0], [33, 16, 2])
    model.backend.init_cuda_graph_state(max_bs=4, max_num_tokens=4)
    assert model.step([4, 1], [33, 16], [34, 17], captured=True) < _CLOSE
    assert model.step([4, 1, 5], [34, 17, 2], [35, 18, 3], captured=True) < _CLOSE
    assert model.step([1, 4], [18, 35], [19, 36], captured=False) < _CLOSE


def test_pages_are_planned_not_tokens(model: _Model) -> None:
    model.step([4, 1], [0, 0], [33, 16])
    plan = model.backend.forward_metadata._wrapper.plans[-1]
    assert plan["page_size"] == _PAGE
    indices = plan.get("paged_kv_indices")
    if indices is None:
        indices = plan["metadata"].kv_indices
    table = model.runner.req_to_token_pool.req_to_token
    assert indices.tolist() == [*(table[4, :33:16] // 16).tolist(), int(table[1, 0]) // 16]


def test_an_idle_step_plans_nothing() -> None:
    backend = FlashInferPagesBackend(_runner(latent=False, dtype=_BF16), FakeFlashInfer)
    backend.init_forward_metadata(SimpleNamespace(forward_mode=ForwardMode.IDLE))
    assert backend.forward_metadata is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sliding_window_size": 64}, "a sliding window"),
        ({"spec_algorithm": SpeculativeAlgorithm.EAGLE}, "speculative decoding"),
        ({"token_to_kv_pool": SimpleNamespace(dtype=_BF16)}, "a SimpleNamespace of torch.bfloat16"),
    ],
)
def test_what_it_cannot_serve_is_refused_at_start(changes: dict[str, Any], says: str) -> None:
    runner = _runner(latent=False, dtype=_BF16, **changes)
    with pytest.raises(UnsupportedError, match=f"does not know {says} yet; run with"):
        FlashInferPagesBackend(runner, FakeFlashInfer)


def test_latent_pages_in_e5m2_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="reads latent pages .* not in fp8_e5m2"):
        FlashInferPagesBackend(_runner(latent=True, dtype=_E5M2), FakeFlashInfer)


def test_a_captured_prefill_is_refused() -> None:
    backend = FlashInferPagesBackend(_runner(latent=False, dtype=_BF16), FakeFlashInfer)
    batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND)
    with pytest.raises(UnsupportedError, match="--cuda-graph-backend-prefill disabled"):
        backend.init_forward_metadata_out_graph(batch, in_capture=True)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"logit_cap": 30.0}, "caps its logits at 30"),
        ({"k_scale": torch.ones(())}, "scales of its own"),
        ({"is_cross_attention": True}, "not causal self-attention"),
    ],
)
def test_a_layer_that_would_come_out_wrong_is_refused(changes: dict[str, Any], says: str) -> None:
    backend = FlashInferPagesBackend(_runner(latent=False, dtype=_E4M3), FakeFlashInfer)
    layer = RadixAttention(_QUERY_HEADS, _DIM, _SCALE, _KV_HEADS, 0)
    for name, value in changes.items():
        setattr(layer, name, value)
    with pytest.raises(UnsupportedError, match=says):
        backend.forward_extend(torch.zeros(1, 1), None, None, layer, SimpleNamespace())


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    flashinfer_pages.register_flashinfer_pages()
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    with pytest.raises(UnsupportedError, match="needs an NVIDIA GPU, and this machine shows none"):
        ATTENTION_BACKENDS[flashinfer_pages.FLASHINFER_PAGES](_runner(latent=False, dtype=_BF16))


def test_on_the_cpu_platform_it_is_refused_before_anything_starts() -> None:
    platform = ExtCpuPlatform()
    chosen = SimpleNamespace(attention_backend=flashinfer_pages.FLASHINFER_PAGES)
    with pytest.raises(UnsupportedError, match="needs an NVIDIA GPU, and this machine shows none"):
        platform.apply_server_args_defaults(chosen)


def test_another_flashinfer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(flashinfer_backend, "version", lambda name: "0.8.0")
    with pytest.raises(UnsupportedError, match="was written for FlashInfer 0.7.2, found 0.8.0"):
        flashinfer_backend.load_flashinfer()

"""Sizes of models whose numbers are public, and the roofline's limits."""

import pytest

from sglang_ext.errors import PlanError
from sglang_ext.plan.hardware import GPUS, Cluster, Model

QWEN_72B = {
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 29568,
    "vocab_size": 152064,
}
DEEPSEEK_V3 = {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "vocab_size": 129280,
}


def test_a_dense_model_with_grouped_heads() -> None:
    model = Model.from_config(QWEN_72B)
    assert model.parameters == pytest.approx(72.7e9, rel=0.01)
    assert model.kv_bytes(2) == 2 * 8 * 128 * 80 * 2
    assert model.kv_bytes(1, ranks=8) == 2 * 8 * 128 * 80
    assert model.kv_bytes(1, ranks=16) == 2 * 2 * 8 * 128 * 80


def test_a_mixture_of_experts_with_latent_attention() -> None:
    model = Model.from_config(DEEPSEEK_V3)
    assert model.parameters == pytest.approx(671e9, rel=0.01)
    assert model.active_parameters == pytest.approx(37e9, rel=0.05)
    # Every rank holds the whole latent vector.
    assert model.kv_bytes(2, ranks=8) == 8 * (512 + 64) * 61 * 2


def test_a_missing_field_is_named() -> None:
    with pytest.raises(PlanError, match="num_hidden_layers"):
        Model.from_config({"hidden_size": 64})


def test_weights_that_do_not_fit_are_refused() -> None:
    cluster = Cluster(gpu=GPUS["h100"], gpus=1, model=Model.from_config(QWEN_72B))
    with pytest.raises(PlanError, match="do not fit"):
        _ = cluster.kv_tokens


def test_the_roofline_is_the_slower_of_computing_and_reading() -> None:
    cluster = Cluster(gpu=GPUS["h200"], gpus=8, model=Model.from_config(QWEN_72B), weight_bytes=1)
    # One of the two tables of words is looked up, not read.
    read = cluster.model.active_parameters / (8 * 4.8e12 * cluster.efficiency.memory)
    assert cluster.prefill_seconds(1, 0) == pytest.approx(read)
    assert cluster.prefill_seconds(0, 100) == 0
    assert cluster.prefill_seconds(8_000, 0) < cluster.prefill_seconds(8_000, 8_000)
    assert cluster.decode_seconds(1, 0) == pytest.approx(read + cluster.efficiency.step_seconds)

"""GPUs and models as a roofline sees them: what a step computes, and what it reads.

Figures of GPUs are those of their data sheets: dense, without sparsity. ``Efficiency`` says how
much of them serving reaches; its defaults are assumptions, stated with every result.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sglang_ext.errors import PlanError

__all__ = ["GPUS", "Cluster", "Efficiency", "Gpu", "Model"]

_PREFILL_CHUNK_TOKENS = 8_192


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU: flop/s, bytes, bytes/s; ``host_link`` is one direction to host memory."""

    bf16_flops: float
    fp8_flops: float
    memory: float
    bandwidth: float
    host_link: float


GPUS: dict[str, Gpu] = {
    "a100": Gpu(bf16_flops=312e12, fp8_flops=312e12, memory=80e9, bandwidth=2.0e12, host_link=32e9),
    "h100": Gpu(
        bf16_flops=989e12, fp8_flops=1979e12, memory=80e9, bandwidth=3.35e12, host_link=64e9
    ),
    "h200": Gpu(
        bf16_flops=989e12, fp8_flops=1979e12, memory=141e9, bandwidth=4.8e12, host_link=64e9
    ),
    "b200": Gpu(
        bf16_flops=2250e12, fp8_flops=4500e12, memory=180e9, bandwidth=8.0e12, host_link=64e9
    ),
    "l40s": Gpu(
        bf16_flops=362e12, fp8_flops=733e12, memory=48e9, bandwidth=0.864e12, host_link=32e9
    ),
}
"""By the name that ``--gpu`` takes. FP8 on an A100 is computed as bf16."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A decoder, from the fields of its ``config.json``. Counts of parameters and numbers."""

    layers: int
    kv_numbers: int
    """Numbers in the cache for one token and layer, all heads together."""
    kv_heads: int
    """Over how many ranks they can be divided; latent attention has 1, and every rank all of it."""
    query_numbers: int
    parameters: float
    active_parameters: float
    """Those that one token runs through: fewer than all in a mixture of experts."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Model":
        """Read a Hugging Face configuration. Raises PlanError naming the field that is missing."""
        config = config.get("text_config", config)
        try:
            return _read(config)
        except KeyError as error:
            raise PlanError(f"config.json has no field {error}; is it that of a decoder?") from None

    def kv_bytes(self, bytes_per_number: float, ranks: int = 1) -> float:
        """Return the bytes of one token's KV on all ranks together.

        With more ranks than KV heads, several hold the same head.
        """
        copies = max(1.0, ranks / self.kv_heads)
        return self.layers * self.kv_numbers * bytes_per_number * copies


def _read(config: Mapping[str, Any]) -> Model:
    hidden, layers, heads = (
        int(config[name]) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )
    latent = config.get("kv_lora_rank")
    if latent:
        kv_numbers, kv_heads = int(latent) + int(config["qk_rope_head_dim"]), 1
        head = int(config["qk_nope_head_dim"]) + int(config["qk_rope_head_dim"])
        attention = _latent_attention(config, hidden, heads)
    else:
        head = int(config.get("head_dim") or hidden // heads)
        kv_heads = int(config.get("num_key_value_heads") or heads)
        kv_numbers = 2 * kv_heads * head
        attention = hidden * head * 2 * (heads + kv_heads)
    total, active = _feed_forward(config, hidden, layers)
    words = int(config["vocab_size"]) * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return Model(
        layers=layers,
        kv_numbers=kv_numbers,
        kv_heads=kv_heads,
        query_numbers=heads * head,
        parameters=layers * attention + total + words,
        active_parameters=layers * attention + active + words / 2,
    )


def _latent_attention(config: Mapping[str, Any], hidden: int, heads: int) -> int:
    """Return the parameters of one layer of multi-head latent attention."""
    rope, nope = int(config["qk_rope_head_dim"]), int(config["qk_nope_head_dim"])
    value, latent = int(config["v_head_dim"]), int(config["kv_lora_rank"])
    rank = config.get("q_lora_rank")
    width = heads * (rope + nope)
    query = int(rank) * (hidden + width) if rank else hidden * width
    return (
        query + hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden
    )


def _feed_forward(config: Mapping[str, Any], hidden: int, layers: int) -> tuple[float, float]:
    """Return the parameters of all feed-forward layers, and those that a token runs through."""
    dense = 3 * hidden * int(config["intermediate_size"])
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    experts = next((int(config[name]) for name in names if config.get(name)), 0)
    if not experts:
        return layers * dense, layers * dense
    first = int(config.get("first_k_dense_replace") or 0)
    size = int(config.get("moe_intermediate_size") or config["intermediate_size"])
    shared = int(config.get("n_shared_experts") or 0)
    expert, sparse = 3 * hidden * size, layers - first
    total = first * dense + sparse * expert * (experts + shared)
    return total, first * dense + sparse * expert * (int(config["num_experts_per_tok"]) + shared)


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of the data sheet that are reached, and seconds that a step costs besides."""

    compute: float = 0.5
    memory: float = 0.6
    link: float = 0.8
    step_seconds: float = 0.004
    request_seconds: float = 0.02
    """From a request's arrival to the scheduler, and from its first token back to the client."""
    host_seconds: float = 0.0
    """Work of the one host process for a request, before it can be scheduled: others wait."""
    memory_for_kv: float = 0.88
    """Share of GPU memory that weights and KV may fill together."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A model on ``gpus`` GPUs with tensor parallelism over all of them; times in seconds."""

    gpu: Gpu
    gpus: int
    model: Model
    weight_bytes: float = 2.0
    """Of one parameter: 2 for bf16, 1 for FP8, which also computes in FP8."""
    kv_number_bytes: float = 2.0
    efficiency: Efficiency = Efficiency()

    @cached_property
    def kv_bytes(self) -> float:
        """Of one token, all GPUs together."""
        return self.model.kv_bytes(self.kv_number_bytes, self.gpus)

    @property
    def kv_tokens(self) -> int:
        """How many tokens fit beside the weights. Raises PlanError where not even those do."""
        room = self.gpus * self.gpu.memory * self.efficiency.memory_for_kv
        room -= self.model.parameters * self.weight_bytes
        if room <= 0:
            raise PlanError(
                f"{self.model.parameters * self.weight_bytes / 1e9:.0f} GB of weights do not fit "
                f"{self.gpus} GPUs of {self.gpu.memory / 1e9:.0f} GB; take more GPUs or fewer bytes"
            )
        return int(room // self.kv_bytes)

    def prefill_seconds(self, new: int, cached: int) -> float:
        """Return how long ``new`` tokens take behind ``cached`` ones.

        2 flops a parameter and token, and 4 for each number of a query and each key before it; or
        the time to read the weights once for each chunk, where that is longer.
        """
        if new <= 0:
            return 0.0
        dense = 2 * self.model.active_parameters * new
        scores = 4 * self.model.layers * self.model.query_numbers * new * (cached + new / 2)
        rate = self.gpus * self.efficiency.compute
        compute = dense / (rate * self._dense_flops) + scores / (rate * self.gpu.bf16_flops)
        chunks = -(-new // _PREFILL_CHUNK_TOKENS)
        return max(compute, chunks * self._read_seconds(self._weights_read(new)))

    def decode_seconds(self, requests: int, context_tokens: float) -> float:
        """Return how long a step of ``requests`` takes that hold so many tokens together."""
        read = self._read_seconds(self._weights_read(requests) + context_tokens * self.kv_bytes)
        rate = self.gpus * self.efficiency.compute * self._dense_flops
        compute = 2 * self.model.active_parameters * requests / rate
        return max(read, compute) + self.efficiency.step_seconds

    def load_seconds(self, tokens: int) -> float:
        """Return how long KV of so many tokens takes from host memory, over all links at once."""
        return tokens * self.kv_bytes / (self.gpus * self.gpu.host_link * self.efficiency.link)

    @property
    def _dense_flops(self) -> float:
        return self.gpu.fp8_flops if self.weight_bytes <= 1 else self.gpu.bf16_flops

    def _weights_read(self, tokens: int) -> float:
        """Bytes of weights that a step of ``tokens`` touches; each brings its own experts."""
        model = self.model
        return min(model.parameters, model.active_parameters * tokens) * self.weight_bytes

    def _read_seconds(self, size: float) -> float:
        return size / (self.gpus * self.gpu.bandwidth * self.efficiency.memory)

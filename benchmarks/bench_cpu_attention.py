"""Is attention on a CPU worth a cache hit? Our backend beside SGLang's ``torch_native``.

A turn is one step through six layers of the demo model's shape on SGLang's own KV pool: metadata,
then the write and the read of scattered pages in each layer. The backends take turns, round by
round, and a bar compares the fastest round of each: only other programs make a round slower.
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from report import Report, arguments, spread
from sglang_ext.patches.cpu_attention_backend import CpuAttentionBackend

HEADS, KV_HEADS, WIDTH, LAYERS = 9, 3, 64, 6
PAGE = 16
POOL_TOKENS = 20_480


@dataclass(frozen=True)
class Case:
    """One batch: requests, tokens that each has cached, tokens that each computes."""

    name: str
    requests: int
    cached: int
    new: int
    bound: float
    decode: bool = False


CASES = [
    Case("16 new on 4,000 cached", 1, 4_000, 16, bound=40),
    Case("200 new on 900 cached", 1, 900, 200, bound=3),
    Case("1,100 new, nothing cached", 1, 0, 1_100, bound=1),
    Case("decode, 16 requests of 1,000", 16, 999, 1, bound=12, decode=True),
]


def make_pools(dtype: torch.dtype) -> tuple[ReqToTokenPool, MHATokenToKVPool]:
    """Return a page table and a pool of random pages."""
    table = ReqToTokenPool(16, 8_192, "cpu", False)
    pool = MHATokenToKVPool(POOL_TOKENS, PAGE, dtype, KV_HEADS, WIDTH, LAYERS, "cpu", False)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        noise = torch.randn(buffer.shape).to(dtype)
        buffer.copy_(noise.view(buffer.dtype))
    return table, pool


def lay_out(case: Case, table: torch.Tensor) -> Any:
    """Scatter the case's pages over the pool and return its batch."""
    length = case.cached + case.new
    pages_each = -(-length // PAGE)
    pages = 1 + torch.randperm(POOL_TOKENS // PAGE)[: case.requests * pages_each]
    slots = (pages.unsqueeze(1) * PAGE + torch.arange(PAGE)).view(case.requests, -1)[:, :length]
    lines = torch.arange(1, 1 + case.requests)
    table[lines, :length] = slots.int()
    return SimpleNamespace(
        forward_mode=ForwardMode.DECODE if case.decode else ForwardMode.EXTEND,
        req_pool_indices=lines,
        seq_lens=torch.full((case.requests,), length),
        extend_prefix_lens=torch.full((case.requests,), case.cached),
        extend_seq_lens=torch.full((case.requests,), case.new),
        encoder_lens=None,
        out_cache_loc=slots[:, case.cached :].flatten(),
        out_cache_loc_is_physical=False,
    )


def make_runner(dtype: torch.dtype) -> Any:
    """Return what a backend reads of a model runner."""
    table, pool = make_pools(dtype)
    return SimpleNamespace(
        device="cpu",
        dtype=torch.bfloat16,
        use_mla_backend=False,
        model_config=SimpleNamespace(is_encoder_decoder=False),
        req_to_token_pool=table,
        token_to_kv_pool=pool,
    )


def make_turn(backend: Any, batch: Any) -> Callable[[], torch.Tensor]:
    """Return a call that takes ``backend`` through one step and gives the last layer's output."""
    layers = [RadixAttention(HEADS, WIDTH, WIDTH**-0.5, KV_HEADS, i) for i in range(LAYERS)]
    rows = batch.out_cache_loc.shape[0]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(rows, heads, WIDTH, generator=generator).bfloat16()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )

    def turn() -> torch.Tensor:
        backend.init_forward_metadata(batch)
        for layer in layers:
            output = backend.forward(q.flatten(1), k, v, layer, batch)
        return output

    return turn


def measure(case: Case, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield one run a round: milliseconds a layer of each backend, and how far they differ."""
    runner = make_runner(torch.bfloat16)
    batch = lay_out(case, runner.req_to_token_pool.req_to_token)
    ours = make_turn(CpuAttentionBackend(runner), batch)
    theirs = make_turn(TorchNativeAttnBackend(runner), batch)
    difference = (ours().float() - theirs().float()).abs().max().item()
    for number in range(rounds):
        yield {
            "case": case.name,
            "round": number,
            "sglang_ext_cpu_ms": milliseconds(ours) / LAYERS,
            "torch_native_ms": milliseconds(theirs) / LAYERS,
            "largest_difference": difference,
        }


def milliseconds(call: Callable[[], Any]) -> float:
    """Time one call."""
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def main() -> int:
    """Run every case and return the exit status."""
    parser = arguments("bench_cpu_attention", __doc__ or "")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    report = Report("Attention, milliseconds a layer")
    report.figures["threads"] = options.threads
    for case in CASES:
        runs = list(measure(case, rounds=6 if options.quick else 25))
        report.runs.extend(runs)
        fastest = {}
        for name in ("sglang_ext_cpu", "torch_native"):
            times = [run[f"{name}_ms"] for run in runs]
            fastest[name] = min(times)
            report.figures[f"{case.name}, {name}"] = {"fastest": min(times)} | asdict(spread(times))
        report.figures[f"{case.name}, largest difference"] = runs[0]["largest_difference"]
        speedup = fastest["torch_native"] / fastest["sglang_ext_cpu"]
        report.at_least(f"{case.name}, times faster", speedup, case.bound)
    return report.finish(options.json)


if __name__ == "__main__":
    with torch.inference_mode():
        status = main()
    sys.exit(status)

"""Do the kernels read our FP8 pages rightly on a GPU, and what does that save? One run, no SGLang.

Every path is compared with float32 over what the pages stand for: FlashInfer over pages of 16 by
heads and latent, in a CUDA graph, merged with unquantized rows, and our Triton kernels. Then decode
is timed against bf16 pages and against pages of one token. Needs one Hopper GPU and FlashInfer
0.7.2, which compiles for minutes unless ``gpu_fp8_modules.py`` has been run before.

``--reference-only`` checks the cases themselves, in plain torch, where there is no GPU.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

# A bare machine has the repository, and nothing of it installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_fp8_cases import CASES, PAGE, SCALE, Case, Pages, error, folded_in_torch, merged_in_torch
from report import Report, Spread, arguments, spread
from sglang_ext.patches.flashinfer_attention import (
    GraphBuffers,
    HeadShape,
    LatentAttention,
    LatentShape,
    PagedAttention,
)
from sglang_ext.tiering.page_plan import pages_of, plan_pages, row_starts
from sglang_ext.tiering.quantizer import E5M2, quantize

BOUND = 0.01
"""Error of an answer over its size: queries, weights and outputs are rounded to bf16."""
EQUAL_CODES = 0.98
"""Share of codes that two ways of writing have in common: sums in another order tip ties."""
WORKSPACE_BYTES = 256 << 20
DEVICE = "cuda"
NO_GPU = 2
"""Exit status of a machine that cannot run this."""

Path_ = Callable[[Pages, Any], torch.Tensor]


def by_flashinfer(pages: Pages, flashinfer: Any) -> torch.Tensor:
    """Answer over real pages."""
    attention = build(pages.case, flashinfer)
    attention.plan(pages.new_rows, pages.plan())
    return run(attention, pages)


def in_a_graph(pages: Pages, flashinfer: Any) -> torch.Tensor:
    """Capture over the first token of each request, plan the whole ones, and replay."""
    plan = pages.plan()
    graph = GraphBuffers.sized(len(pages.lengths), len(plan.indices), DEVICE)
    attention = build(pages.case, flashinfer, graph)
    attention.plan(pages.new_rows, pages.plan(torch.ones_like(pages.lengths)))
    run(attention, pages)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        output = run(attention, pages)
    attention.plan(pages.new_rows, plan)
    captured.replay()
    return output


def merged(pages: Pages, flashinfer: Any) -> torch.Tensor:
    """Read what is cached from pages, the new rows as they are, and merge the states."""
    case, query, starts = pages.case, pages.query, row_starts(pages.new_rows)
    cached = pages.plan(pages.lengths - pages.new_rows)
    new = torch.cat([slots[-(rows.stop - rows.start) :] for rows, slots in pages.requests()])
    workspace = make_workspace()
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa2")
    shared = {"sm_scale": SCALE, "q_data_type": query.dtype, "num_qo_heads": case.query_heads}
    shared |= {"num_kv_heads": case.kv_heads, "head_dim_qk": case.dim}
    ragged.plan(starts, starts, causal=True, **shared)
    raw = ragged.run(query, pages.raw_keys[new], pages.raw_values[new], return_lse=True)
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
    paged.plan(
        starts,
        cached.indptr,
        cached.indices,
        cached.last_page_len,
        page_size=PAGE,
        kv_data_type=case.format.dtype,
        **shared,
    )
    pools = (pages_of(pages.keys, PAGE), pages_of(pages.values, PAGE))
    folded, lse = paged.run(pages.folding.query(query), pools, return_lse=True)
    state = pages.folding.output(folded), pages.folding.log2_sum_exp(lse, query, SCALE)
    output: torch.Tensor = flashinfer.merge_state(*raw, *state)[0]
    return output


def by_triton(pages: Pages, _flashinfer: Any) -> torch.Tensor:
    """Answer by our own kernel."""
    from sglang_ext.tiering.triton_pages import attend_pages

    query = pages.folding.query(pages.query)
    found = attend_pages(query, pages.keys, pages.values, pages.plan(), PAGE, SCALE)
    return pages.folding.output(found)


def paths(case: Case) -> Iterator[tuple[str, Path_]]:
    """Yield every way to answer ``case``."""
    if case.merged:
        yield "FlashInfer, merged", merged
        return
    # FlashInfer's latent kernels do not know E5M2.
    known = not (case.rank and case.format is E5M2)
    if known:
        yield "FlashInfer", by_flashinfer
    if known and case.decodes:
        yield "FlashInfer, CUDA graph", in_a_graph
    if case.decodes:
        yield "Triton", by_triton


def build(
    case: Case, flashinfer: Any, graph: GraphBuffers | None = None
) -> PagedAttention | LatentAttention:
    """Return FlashInfer's wrapper for a case."""
    kinds = (PAGE, torch.bfloat16, case.format.dtype)
    if case.rank:
        latent = LatentShape(case.query_heads, case.rank, case.dim - case.rank, *kinds, SCALE)
        return LatentAttention(flashinfer, make_workspace(), latent, graph)
    heads = HeadShape(case.query_heads, case.kv_heads, case.dim, *kinds)
    return PagedAttention(flashinfer, make_workspace(), heads, graph)


def run(attention: PagedAttention | LatentAttention, pages: Pages) -> torch.Tensor:
    """Answer a planned step, folded."""
    query = pages.folding.query(pages.query)
    if isinstance(attention, LatentAttention):
        return pages.folding.output(attention.run(query, pages.keys))
    return pages.folding.output(attention.run(query, pages.keys, pages.values, SCALE))


def make_workspace() -> torch.Tensor:
    """Return FlashInfer's scratch memory."""
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=DEVICE)


def check_answers(report: Report, flashinfer: Any, seed: int) -> None:
    """Compare every path of every case with float32, and what is written with the quantizer."""
    from sglang_ext.tiering.triton_pages import write_codes

    for case in CASES:
        pages = Pages(case, DEVICE, seed)
        expected = pages.expected()
        for name, path in paths(case):
            found = error(path(pages, flashinfer), expected)
            report.at_most(f"{case.name}: {name}", found, BOUND)
        written = write_codes(pages.raw_keys, pages.of_keys, case.format).float()
        wanted = quantize(pages.raw_keys, pages.of_keys, case.format).codes.float()
        same = float((written == wanted).float().mean())
        report.at_least(f"{case.name}: codes written", same, EQUAL_CODES)


@dataclass(frozen=True)
class Decode:
    """A decode batch to time: ``requests`` of ``length`` tokens on pages of ``page`` tokens."""

    name: str
    dtype: torch.dtype
    page: int
    latent: bool
    requests: int
    length: int

    @property
    def channels(self) -> int:
        """Stored numbers of a token."""
        return 512 + 64 if self.latent else 2 * 8 * 128


def decodes(requests: int, length: int) -> Iterator[Decode]:
    """Yield what is timed, the yardstick of each kind first."""
    narrow = torch.float8_e4m3fn
    for latent, kind in ((False, "GQA 32/8 x 128"), (True, "MLA 128 heads")):
        for name, dtype, page in (
            ("bf16, pages of 16", torch.bfloat16, PAGE),
            ("bf16, pages of 1", torch.bfloat16, 1),
            ("E4M3, pages of 16", narrow, PAGE),
            ("E4M3, pages of 1", narrow, 1),
        ):
            yield Decode(f"{kind}: {name}", dtype, page, latent, requests, length)
    e5m2 = torch.float8_e5m2
    yield Decode("GQA 32/8 x 128: E5M2, pages of 16", e5m2, PAGE, False, requests, length)


def time_decode(case: Decode, flashinfer: Any) -> Spread:
    """Return the milliseconds of one layer's attention, planned before."""
    slots = case.requests * case.length
    table = torch.randperm(slots // PAGE, device=DEVICE).unsqueeze(1) * PAGE
    table = (table + torch.arange(PAGE, device=DEVICE)).view(case.requests, -1).int()
    lines = torch.arange(case.requests, device=DEVICE)
    lengths = torch.full((case.requests,), case.length)
    plan, kinds = plan_pages(table, lines, lengths, case.page), (case.page, torch.bfloat16)
    new_rows, workspace = torch.ones_like(lengths), make_workspace()
    if case.latent:
        latent = LatentShape(128, 512, 64, *kinds, case.dtype, SCALE)
        attention = LatentAttention(flashinfer, workspace, latent)
        attention.plan(new_rows, plan)
        query, rows = _noise(case, 128, 576), _pool(case, slots, 1, 576)
        return _time(lambda: attention.run(query, rows))
    heads = PagedAttention(flashinfer, workspace, HeadShape(32, 8, 128, *kinds, case.dtype))
    heads.plan(new_rows, plan)
    query, keys = _noise(case, 32, 128), _pool(case, slots, 8, 128)
    values = keys.clone()
    return _time(lambda: heads.run(query, keys, values, SCALE))


def _noise(case: Decode, heads: int, dim: int) -> torch.Tensor:
    return torch.randn(case.requests, heads, dim, device=DEVICE, dtype=torch.bfloat16)


def _pool(case: Decode, slots: int, heads: int, dim: int) -> torch.Tensor:
    noise = torch.randn(slots, heads, dim, device=DEVICE, dtype=torch.bfloat16)
    return noise.to(case.dtype)


def _time(call: Callable[[], torch.Tensor], rounds: int = 30) -> Spread:
    found = []
    for _ in range(rounds + 5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return spread(found[5:])


def check_times(report: Report, flashinfer: Any, quick: bool) -> None:
    """Time decode over each kind of page; figures, since no bar was set."""
    requests, length = (16, 2_048) if quick else (64, 4_096)
    yardstick = 1.0
    for case in decodes(requests, length):
        taken = time_decode(case, flashinfer)
        bytes_read = case.requests * case.length * case.channels * case.dtype.itemsize
        report.runs.append({"case": case.name, "ms": asdict(taken), "bytes": bytes_read})
        if case.dtype is torch.bfloat16 and case.page == PAGE:
            yardstick = taken.median
        report.figures[case.name] = {
            "ms": taken.median,
            "GB/s": bytes_read / taken.median / 1e6,
            "of bf16, pages of 16": taken.median / yardstick,
        }


def check_cases(report: Report, seed: int) -> None:
    """Compare folded attention in plain torch with the references, without a GPU."""
    for case in CASES:
        pages = Pages(case, "cpu", seed)
        found = merged_in_torch(pages) if case.merged else folded_in_torch(pages)
        report.at_most(case.name, error(found, pages.expected()), BOUND)


def missing() -> str | None:
    """Return why this machine cannot run the check, None where it can."""
    if not torch.cuda.is_available():
        return "no NVIDIA GPU here; --reference-only checks the cases without one"
    if torch.cuda.get_device_capability() != (9, 0):
        name = torch.cuda.get_device_name()
        return f"{name} is no Hopper GPU (SM90), which latent FP8 pages need"
    if importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer cannot be imported; install flashinfer_python 0.7.2"
    return None


def main() -> int:
    parser = arguments("gpu_fp8", __doc__.splitlines()[0])
    parser.add_argument("--reference-only", action="store_true", help="no GPU: the cases alone")
    options = parser.parse_args()
    report = Report("FP8 pages on a GPU")
    if options.reference_only:
        check_cases(report, options.seed)
        return report.show()
    if (reason := missing()) is not None:
        print(f"gpu_fp8_check: {reason}", file=sys.stderr)
        return NO_GPU
    import flashinfer

    report.figures["GPU"] = torch.cuda.get_device_name()
    check_answers(report, flashinfer, options.seed)
    check_times(report, flashinfer, options.quick)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())

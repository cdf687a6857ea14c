"""FlashInfer's attention over real pages: what its wrappers are told, once a step and once a layer.

SGLang plans FlashInfer with pages of one token, whatever ``--page-size`` is, and converts a latent
pool to bf16 at every layer. Here its kernels get pages as they are stored, FP8 or not. Scales and
means are folded around the call (``tiering/folding.py``), so the kernels are the stock ones.

``flashinfer`` is the imported package: who builds these objects imports it, late. Written for
FlashInfer 0.7.2. Not yet run on a GPU.
"""

from dataclasses import dataclass
from typing import Any

import torch

from sglang_ext.tiering.page_plan import PagePlan, pages_of, row_starts

__all__ = ["GraphBuffers", "HeadShape", "LatentAttention", "LatentShape", "PagedAttention"]


@dataclass(frozen=True, slots=True)
class GraphBuffers:
    """Where the plan of a captured CUDA graph lies: int32 on the device, at addresses that stay.

    ``row_starts`` and ``page_starts`` [requests + 1], ``pages`` [most pages], ``tails`` [requests].
    """

    row_starts: torch.Tensor
    page_starts: torch.Tensor
    pages: torch.Tensor
    tails: torch.Tensor

    @classmethod
    def sized(cls, requests: int, pages: int, device: torch.device | str) -> "GraphBuffers":
        """Make room for batches of up to ``requests`` requests with ``pages`` pages in all."""

        def zeros(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        return cls(zeros(requests + 1), zeros(requests + 1), zeros(pages), zeros(requests))

    def first(self, requests: int) -> "GraphBuffers":
        """Return the part that a batch of ``requests`` uses."""
        starts = slice(requests + 1)
        return GraphBuffers(
            self.row_starts[starts], self.page_starts[starts], self.pages, self.tails[:requests]
        )


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Attention by heads: what every layer of one rank has in common."""

    query_heads: int
    kv_heads: int
    dim: int
    page_size: int
    query_dtype: torch.dtype
    page_dtype: torch.dtype
    soft_cap: float = 0.0


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Latent attention (MLA): rows of ``rank`` + ``tail`` channels, one for all heads."""

    query_heads: int
    rank: int
    tail: int
    page_size: int
    query_dtype: torch.dtype
    page_dtype: torch.dtype
    softmax_scale: float


class PagedAttention:
    """One of FlashInfer's wrappers for attention by heads.

    Its FA2 prefill kernel serves decode too: the only one that reads FP8 pages of both formats
    with 16-bit queries on Hopper, and what FlashInfer's decode wrapper runs with tensor cores.
    """

    def __init__(
        self,
        flashinfer: Any,
        workspace: torch.Tensor,
        shape: HeadShape,
        graph: GraphBuffers | None = None,
    ) -> None:
        self._shape = shape
        buffers = {} if graph is None else _head_buffers(graph)
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace, "NHD", backend="fa2", **buffers
        )

    def plan(self, new_rows: torch.Tensor, pages: PagePlan) -> None:
        """Lay out one step: ``new_rows`` [requests] of each, on the host, over ``pages``.

        The new rows are the last of their request, already stored, and attend causally.
        """
        shape = self._shape
        self._wrapper.plan(
            row_starts(new_rows),
            pages.indptr,
            pages.indices,
            pages.last_page_len,
            num_qo_heads=shape.query_heads,
            num_kv_heads=shape.kv_heads,
            head_dim_qk=shape.dim,
            page_size=shape.page_size,
            causal=True,
            # Layers may differ in their scale, so that it comes with the call, as ``k_scale``.
            sm_scale=1.0,
            logits_soft_cap=shape.soft_cap,
            q_data_type=shape.query_dtype,
            kv_data_type=shape.page_dtype,
        )

    def run(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, softmax_scale: float
    ) -> torch.Tensor:
        """Attend query [rows, query heads, dim] over pools [slots, KV heads, dim].

        Returns [rows, query heads, dim] in the query's dtype, over codes where the pool has codes.
        """
        pages = tuple(pages_of(pool, self._shape.page_size) for pool in (keys, values))
        output: torch.Tensor = self._wrapper.run(query, pages, k_scale=softmax_scale)
        return output


class LatentAttention:
    """FlashInfer's wrapper for latent attention, in its absorbed form.

    Of FP8 it reads E4M3 only, and on Hopper (SM90) only.
    """

    def __init__(
        self,
        flashinfer: Any,
        workspace: torch.Tensor,
        shape: LatentShape,
        graph: GraphBuffers | None = None,
    ) -> None:
        self._shape, self._metadata = shape, flashinfer.mla.MLAPlanMetadata
        self._scales = (
            {"ckv_scale": 1.0, "kpe_scale": 1.0} if shape.page_dtype != shape.query_dtype else {}
        )
        buffers = {} if graph is None else _latent_buffers(graph)
        self._wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace, **buffers)

    def plan(self, new_rows: torch.Tensor, pages: PagePlan) -> None:
        """Lay out one step: ``new_rows`` [requests] of each, on the host, over ``pages``.

        The new rows are the last of their request, already stored, and attend causally.
        """
        shape = self._shape
        self._wrapper.plan(
            metadata=self._metadata.csr(
                row_starts(new_rows), pages.indptr, pages.indices, pages.lengths
            ),
            num_heads=shape.query_heads,
            head_dim_ckv=shape.rank,
            head_dim_kpe=shape.tail,
            page_size=shape.page_size,
            causal=True,
            sm_scale=shape.softmax_scale,
            q_data_type=shape.query_dtype,
            kv_data_type=shape.page_dtype,
        )

    def run(self, query: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Attend query [rows, query heads, rank + tail] over a pool [slots, 1, rank + tail].

        Returns [rows, query heads, rank] in the query's dtype, over codes where the pool has codes.
        """
        pages = pages_of(rows, self._shape.page_size).squeeze(2)
        output: torch.Tensor = self._wrapper.run(query=query, kv_cache=pages, **self._scales)
        return output


def _head_buffers(graph: GraphBuffers) -> dict[str, Any]:
    return {
        "use_cuda_graph": True,
        "qo_indptr_buf": graph.row_starts,
        "paged_kv_indptr_buf": graph.page_starts,
        "paged_kv_indices_buf": graph.pages,
        "paged_kv_last_page_len_buf": graph.tails,
    }


def _latent_buffers(graph: GraphBuffers) -> dict[str, Any]:
    return {
        "use_cuda_graph": True,
        "qo_indptr": graph.row_starts,
        "kv_indptr": graph.page_starts,
        "kv_indices": graph.pages,
        "kv_len_arr": graph.tails,
    }

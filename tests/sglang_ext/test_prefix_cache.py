"""The cache as the scheduler uses it: requests, chunks, the clock, what is fetched from below."""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_ext.fetching import LEAST_FETCH
from sglang_ext.namespace import SYSTEM_OWNER
from sglang_ext.prefix_cache import TenantRadixCache, _bytes_per_token
from sglang_ext.radix.hashes import boundary_seed
from sglang_ext.radix.integrity import check_integrity
from sglang_ext.radix.key import SYSTEM_NAMESPACE
from sglang_ext.request_tag import NO_TAG
from sglang_ext.types import PUBLIC, Owner, Tier
from tests.radix.caches import Rig, make_rig, namespace

PAGE = 4
PROMPT = [7] * 8


class Request:
    """A request as far as the cache sees it, with its own row and slots."""

    rid, session, session_id, priority, kv_rotation_base = "r", None, None, 0, None
    kv_tag = NO_TAG
    cache_salt, lock, last_node, skip_radix_cache_insert = None, None, None, False

    def __init__(self, rig: Rig, prompt: list[int], extra_key: str | None, row: int) -> None:
        self.rig, self.extra_key = rig, extra_key
        self.origin_input_ids = array("q", prompt)
        self.full_untruncated_fill_ids = array("q", prompt)
        self.kv = SimpleNamespace(req_pool_idx=row, cache_protected_len=0, cache_inserted_len=0)
        self.done = False

    def finished(self) -> bool:
        return self.done

    def admit(self) -> None:
        """Match, lock, and take over the row of what is cached."""
        rig, kv = self.rig, self.kv
        key = RadixKey(self.origin_input_ids, self.extra_key, limit=len(self.origin_input_ids) - 1)
        found = rig.cache.match_prefix(MatchPrefixParams(key=key))
        self.lock = rig.cache.lock(found.last_device_node)
        self.held = kv.cache_protected_len = found.device_prefix_len
        row = rig.core.collect_full_device_indices(
            found.last_device_node, rig.core.root_node_handle()
        )
        rig.cache.req_to_token_pool.write((kv.req_pool_idx, slice(0, self.held)), row)

    def compute(self, up_to: int) -> None:
        """Fill the row up to here, as the forward pass does."""
        rig, kv = self.rig, self.kv
        pages = -(-up_to // rig.page_size) * rig.page_size
        if pages > self.held:
            fresh = rig.alloc(pages - self.held)
            rig.cache.req_to_token_pool.write((kv.req_pool_idx, slice(self.held, pages)), fresh)
            self.held = pages

    def checkpoint(self, up_to: int) -> None:
        self.rig.cache.checkpoint(self, up_to=up_to)

    def finish(self, output: list[int]) -> None:
        self.full_untruncated_fill_ids = self.origin_input_ids + array("q", output)
        self.compute(len(self.full_untruncated_fill_ids))
        self.done = True
        self.checkpoint(len(self.full_untruncated_fill_ids))
        row = self.rig.cache.req_to_token_pool.req_to_token[self.kv.req_pool_idx]
        left = row[self.kv.cache_protected_len : self.held].to(torch.int64)
        if len(left):
            self.rig.allocator.free_segment(left, start_pos=0)
        self.rig.cache.unlock(self.lock)


@pytest.mark.parametrize("length", range(1, 2 * PAGE + 2))
@pytest.mark.parametrize("chunk", [PAGE, 3 * PAGE])
def test_requests_of_every_length_and_chunk_leave_what_they_computed(
    length: int, chunk: int
) -> None:
    rig = make_rig(256, PAGE, [PROMPT])
    prompt, output = PROMPT + [1] * length, [2] * length
    for row, owner in enumerate(("t:a", "t:b", "t:a"), start=1):
        request = Request(rig, prompt, namespace(owner), row)
        request.admit()
        for end in [*range(request.held + chunk, len(prompt), chunk), len(prompt)]:
            request.compute(end)
            request.checkpoint(end)
            check_integrity(rig.cache)
        request.finish(output)
        check_integrity(rig.cache)
        assert rig.accounted() == rig.size
        whole = len(prompt + output) // PAGE * PAGE
        assert rig.hit(prompt + output, owner) == whole
    assert rig.hit(prompt, "t:c") == 8
    assert rig.core.ledger.usage(PUBLIC, Tier.HBM).tokens == 8


def test_a_request_without_a_namespace_belongs_to_the_system_tenant() -> None:
    rig = make_rig(256, PAGE, [PROMPT])
    request = Request(rig, PROMPT + [1] * 8, None, 1)
    request.admit()
    request.finish([])
    assert rig.core.ledger.usage(SYSTEM_OWNER, Tier.HBM).tokens == 8
    assert rig.hit(PROMPT + [1] * 8, "t:a") == 8


def test_a_tick_moves_the_stamps_of_later_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(256, PAGE)
    rig.insert([1] * 8, "t:a")
    node = rig.core.node_by_id(rig.match([1] * 8, "t:a").last_device_node)
    first = node.access_ms
    monkeypatch.setattr(rig.cache.clock, "_read", lambda: first + 40)
    assert rig.cache.tick() == first + 40
    assert node.access_ms == first
    rig.match([1] * 8, "t:a")
    assert node.access_ms == first + 40


def test_a_tick_takes_the_latest_time_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(256, PAGE)
    reduced = []

    def all_reduce(numbers: torch.Tensor, op: Any) -> None:
        reduced.append((numbers[0].item(), op))
        numbers += 5

    monkeypatch.setattr(rig.cache, "_all_reduce", all_reduce)
    monkeypatch.setattr(rig.cache, "_alone", False)
    assert rig.cache._agree(100) == 105
    assert reduced == [(100, torch.distributed.ReduceOp.MAX)]
    assert rig.cache.worth.least == {Tier.CPU: 6, Tier.NVME: LEAST_FETCH + 5}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Collect what SGLang is asked to fetch: tokens, last hash, extra key, salt."""
    calls: list[tuple[Any, ...]] = []

    def prefetch(
        self: Any,
        request: Any,
        node: int,
        tokens: Any,
        last_hash: Any,
        keys: Any,
        matched: Any,
        extra_key: Any,
        cache_salt: Any,
        hit_end: Any,
    ) -> None:
        calls.append((list(tokens), last_hash, extra_key, cache_salt))

    monkeypatch.setattr(UnifiedRadixCache, "prefetch_from_storage", prefetch)
    # This cache has no host memory.
    monkeypatch.setattr(TenantRadixCache, "_copy_path_down", lambda self, node: True)
    return calls


def fetch(rig: Rig, text: list[int], extra_key: str | None, salt: str | None = None) -> None:
    found = rig.match(text, "t:a") if extra_key else rig.match(text, SYSTEM_OWNER)
    start = found.device_prefix_len
    rig.cache.enable_storage = True
    rig.cache.worth.agree([1, 1, 0])
    rig.cache.prefetch_from_storage(
        None,
        found.last_device_node,
        array("q", text[start:]),
        rig.core.get_last_hash_value(found.last_device_node),
        extra_key=extra_key,
        cache_salt=salt,
    )


def test_public_pages_are_fetched_alone_and_without_a_namespace(asked: Any) -> None:
    rig = make_rig(256, PAGE, [PROMPT])
    fetch(rig, PROMPT + [1] * 8, namespace("t:a"), "salt")
    assert asked == [(PROMPT, None, None, None)]


def test_private_pages_behind_a_public_run_are_chained_to_the_owner(asked: Any) -> None:
    rig = make_rig(256, PAGE, [PROMPT])
    rig.core.enable_storage = True
    rig.insert(PROMPT, "t:b")
    fetch(rig, PROMPT + [1] * 8, namespace("t:a"), "salt")
    public = rig.core.get_last_hash_value(rig.match(PROMPT, "t:b").last_device_node)
    seed = boundary_seed(public, namespace("t:a"), "salt")
    assert asked == [([1] * 8, seed, namespace("t:a"), "salt")]


def test_pages_below_a_private_run_continue_its_chain(asked: Any) -> None:
    rig = make_rig(256, PAGE, [PROMPT])
    rig.core.enable_storage = True
    rig.insert(PROMPT + [1] * 4, "t:a")
    fetch(rig, PROMPT + [1] * 8, namespace("t:a"))
    last = rig.core.get_last_hash_value(rig.match(PROMPT + [1] * 4, "t:a").last_device_node)
    assert asked == [([1] * 4, last, namespace("t:a"), None)]


def test_the_system_tenant_fetches_in_its_own_namespace(asked: Any) -> None:
    rig = make_rig(256, PAGE, [PROMPT])
    fetch(rig, [1] * 8, None)
    assert asked == [([1] * 8, None, SYSTEM_NAMESPACE, None)]


def test_bytes_of_a_token_are_those_of_all_layers() -> None:
    pool = MHATokenToKVPool(64, PAGE, torch.bfloat16, 2, 8, 3, "cpu", False)
    allocator = SimpleNamespace(get_kvcache=lambda: pool)
    assert _bytes_per_token(allocator) == 2 * 2 * 8 * 2 * 3


def test_running_tokens_are_part_of_what_an_owner_holds() -> None:
    rig = make_rig(256, PAGE)
    rig.insert([1] * 8, "t:a")
    rig.cache.ledger.set_running({Owner("t:a"): 12})
    assert rig.cache.ledger.usage(Owner("t:a"), Tier.HBM).tokens == 20
    check_integrity(rig.cache)

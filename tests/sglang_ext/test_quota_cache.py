"""Reserves, hard quotas and refusals on SGLang's real cache."""

from types import SimpleNamespace

import pytest
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_ext.cache_backend import quota_books
from sglang_ext.errors import PolicyError, UnsupportedError
from sglang_ext.radix.integrity import check_integrity
from sglang_ext.radix.order import Reason
from sglang_ext.radix.victims import Eviction
from sglang_ext.tenancy.loader import parse_policy
from sglang_ext.tenancy.quota import QuotaBook
from sglang_ext.types import PUBLIC, OwnerLimits, Tier
from tests.radix.caches import make_rig, namespace
from tests.sglang_ext.quota_rigs import PAGE, POOL, PROMPT, A, B, held, insert, limited, text
from tests.sglang_ext.test_prefix_cache import Request


def test_a_reserve_outlives_any_flood_even_when_its_owner_is_silent() -> None:
    rig = limited("tenants: {a: {quota: {hbm: 100%}}, b: {reserve: {hbm: 192tok}}}")
    insert(rig, B, 1, 20)
    for number in range(60):
        insert(rig, A, 10 + number, 4)
    assert held(rig, B) == 320, "within its fair share it keeps more than its reserve"
    promised = rig.cache.evictable_size()
    assert promised == rig.core.evictable_size() - 192
    assert rig.evict(rig.size) == promised
    # One leaf of 320 tokens was cut: exactly the reserve stays, from the front.
    assert held(rig, B) == rig.hit(text(1, 20), B) == 192
    assert rig.evict(rig.size) == 0
    check_integrity(rig.cache)
    with rig.cache.as_requester([B]):
        assert rig.evict(rig.size) == 192


def test_unused_reserve_holds_others_pages_until_the_owner_comes() -> None:
    rig = limited("tenants: {a: {quota: {hbm: 100%}}, b: {reserve: {hbm: 50%}}}")
    for number in range(16):
        insert(rig, A, number, 4)
    assert held(rig, A) == rig.size
    for number in range(8):
        insert(rig, B, 100 + number, 4)
    assert (held(rig, A), held(rig, B)) == (rig.size // 2, rig.size // 2)
    # Now B rolls over its own reserve when nothing else may go, and A over its own part.
    lock = rig.cache.lock(rig.match(text(15, 4), A).last_device_node)
    insert(rig, B, 200, 4)
    insert(rig, A, 300, 4)
    rig.cache.unlock(lock)
    assert held(rig, B) >= rig.size // 2


def test_public_pages_above_a_reserved_page_are_not_promised() -> None:
    rig = limited("tenants: {a: {}, b: {reserve: {hbm: 64tok}}}", public=[PROMPT])
    with rig.cache.as_requester([B]):
        rig.insert(PROMPT + text(1, 4), B)
    assert rig.cache.evictable_size() == 0
    assert rig.cache.protected_size() == 8 * PAGE
    assert rig.evict(rig.size) == 0
    with rig.cache.as_requester([B]):
        assert rig.cache.evictable_size() == 8 * PAGE
        assert rig.evict(rig.size) == 8 * PAGE
    assert held(rig, PUBLIC) == 0


def test_headroom_keeps_running_tokens_out_of_the_reserve_of_others() -> None:
    rig = limited("tenants: {a: {quota: {hbm: 100%}}, b: {reserve: {hbm: 25%}}, c: {}}")
    quarter = rig.size // 4
    assert rig.cache.headroom(A) == rig.size - quarter
    assert rig.cache.headroom(B) == rig.size
    for number in range(16):
        insert(rig, A, number, 4)
    assert rig.cache.headroom(A) == rig.size - quarter, "its own cached pages make room"
    # Running tokens of A count against it, and against B only beyond B's reserve.
    slots = rig.alloc(quarter)
    rig.cache.ledger.set_running({A: quarter})
    assert rig.cache.headroom(A) == 2 * quarter
    assert rig.cache.headroom(B) == rig.size - quarter
    rig.allocator.free_segment(slots, start_pos=0)
    rig.cache.ledger.set_running({})
    assert rig.cache.headroom(A) == rig.size - quarter


def test_a_hard_quota_is_kept_by_cutting_the_oldest_leaf() -> None:
    rig = limited("tenants: {a: {quota: {hbm: 200tok, hard: true}}}")
    insert(rig, A, 1, 10)
    assert held(rig, A) == 160
    assert rig.cache.enforce_hard_quota(A, incoming=100) == 0
    assert held(rig, A) == 96, "the largest number of pages that leaves room for 100 tokens"
    insert(rig, A, 2, 6)
    assert held(rig, A) == 192
    assert rig.hit(text(1, 10), A) == 96
    assert rig.cache.evictions[Eviction(A, Tier.HBM, Reason.QUOTA)] == 64


def test_what_is_locked_counts_for_a_hard_quota_and_stays() -> None:
    rig = limited("tenants: {a: {quota: {hbm: 10%, hard: true}}}")
    quota = rig.cache.limits(A).quota
    insert(rig, A, 1, 4)
    lock = rig.cache.lock(rig.match(text(1, 4), A).last_device_node)
    assert rig.cache.headroom(A) == quota - 64
    assert rig.cache.enforce_hard_quota(A, incoming=quota) == 64
    rig.cache.unlock(lock)
    assert rig.cache.headroom(A) == quota


def test_a_hard_quota_makes_room_before_an_allocation() -> None:
    rig = limited("tenants: {a: {quota: {hbm: 160tok, hard: true}}}")
    insert(rig, A, 1, 10)
    with rig.cache.as_requester([A], {A: 64}):
        assert held(rig, A) == 96
        slots = rig.alloc(64)
    assert rig.cache.ledger.usage(A, Tier.HBM).running == 64
    assert rig.cache.headroom(A) == 96
    rig.allocator.free_segment(slots, start_pos=0)
    rig.cache.ledger.set_running({})


def test_a_large_allocation_does_not_take_from_owners_within_their_share() -> None:
    rig = limited("defaults: {quota: {hbm: 100%}}\ntenants: {a: {}, b: {}}")
    for number in range(8):
        insert(rig, B, number, 4)
    insert(rig, A, 90, 4)
    with rig.cache.as_requester([A], {A: 600}):
        slots = rig.alloc(28 * PAGE + 64)
    assert held(rig, B) == 8 * 4 * PAGE, "A gave its own pages for what goes beyond its share"
    rig.allocator.free_segment(slots, start_pos=0)


@pytest.mark.parametrize("finished", [True, False])
def test_running_tokens_become_pages_or_go_and_are_never_counted_twice(finished: bool) -> None:
    """A request of 20 tokens hands its pages over, and is within its hard quota all the time."""
    rig = limited("tenants: {a: {quota: {hbm: 40tok, hard: true}}}", 256, 4)
    request = Request(rig, text(1, 5, 4), namespace(A), row=1)
    usage = rig.cache.ledger.usage
    request.admit()
    with rig.cache.as_requester([A], {A: 20}):
        request.compute(20)
    request.kv.kv_allocated_len = 20
    assert (usage(A, Tier.HBM).running, held(rig, A)) == (20, 20)
    request.checkpoint(16)
    assert (usage(A, Tier.HBM).running, held(rig, A)) == (4, 20)
    request.kv.kv_allocated_len = 24
    with rig.cache.as_requester([A], {A: 4}):
        if finished:
            request.finish([5] * 3)
    rig.cache.on_release(request, checkpointed=finished)
    assert usage(A, Tier.HBM).running == 0
    assert held(rig, A) == (20 if finished else 16)
    check_integrity(rig.cache)


def test_a_tick_brings_an_owner_under_its_hard_quota() -> None:
    rig = limited("tenants: {a: {quota: {hbm: 160tok, hard: true}}}")
    rig.insert(text(1, 30), A)
    assert held(rig, A) == 480
    rig.cache.tick()
    assert held(rig, A) == 160


@pytest.mark.parametrize(
    ("tenant", "most", "bound"),
    [
        ("quota: {hbm: 200tok, hard: true}", 200, "its hard quota"),
        ("quota: {hbm: 200tok}", 768, "what nobody else has reserved"),
        ("reserve: {hbm: 40%}", 768, "what nobody else has reserved"),
        ("quota: {hbm: 100%, hard: true}", 768, "what nobody else has reserved"),
    ],
)
def test_a_request_that_never_fits_is_refused_with_the_numbers(
    tenant: str, most: int, bound: str
) -> None:
    rig = limited(f"tenants: {{a: {{{tenant}}}, b: {{reserve: {{hbm: 25%}}}}}}")
    assert rig.cache.fits_ever(A, most) is None
    assert rig.cache.fits_ever(A, most + 1) == (
        f"the request needs {most + 1} tokens of KV cache, expected at most {most} ({bound})"
    )


def test_without_limits_the_pool_is_the_bound() -> None:
    rig = make_rig(POOL, PAGE)
    assert rig.cache.headroom(A) == POOL
    assert rig.cache.fits_ever(A, POOL) is None
    assert rig.cache.fits_ever(A, POOL + 1).endswith("at most 1024 (the whole pool)")
    assert rig.cache.limits(A) == OwnerLimits()
    assert rig.cache.enforce_hard_quota(A, 10**6) == 0


def test_books_of_the_tiers_that_there_are() -> None:
    rig = make_rig(POOL, PAGE)
    policy = parse_policy("version: 1\ntenants: {a: {}}")
    assert [book.tier for book in quota_books(policy, rig.cache)] == [Tier.HBM]
    rig.cache.host_pool_group = SimpleNamespace(size=4 * POOL)
    books = quota_books(policy, rig.cache)
    assert [(book.tier, book.capacity) for book in books] == [
        (Tier.HBM, POOL),
        (Tier.CPU, 4 * POOL),
    ]
    wide = "version: 1\ntenants: {a: {quota: {hbm: 1GB}}}"
    with pytest.raises(PolicyError, match="does not say how many bytes"):
        quota_books(parse_policy(wide, check_supported=False), rig.cache)


def test_models_with_window_or_state_pools_refuse_reserves() -> None:
    rig = make_rig(POOL, PAGE)
    rig.cache.tree_components = (ComponentType.FULL, ComponentType.SWA)
    body = "version: 1\ntenants: {a: {reserve: {hbm: 10%}}}"
    policy = parse_policy(body, check_supported=False)
    with pytest.raises(UnsupportedError, match=r"reserve\.hbm and hard quotas"):
        rig.cache.limit([QuotaBook(policy, Tier.HBM, POOL, 1)])

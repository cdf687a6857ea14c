"""Quotas, reserves and pins on SGLang's real cache: trials 23, 25, 28, 35, 37, 40 on the tree."""

from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_ext.cache_backend import quota_books
from sglang_ext.errors import PolicyError, UnsupportedError
from sglang_ext.radix.integrity import check_integrity
from sglang_ext.radix.order import Reason
from sglang_ext.radix.victims import Eviction
from sglang_ext.tenancy.loader import parse_policy
from sglang_ext.tenancy.quota import QuotaBook
from sglang_ext.types import PUBLIC, Owner, OwnerLimits, Tier
from tests.radix.caches import Rig, make_rig, make_stock_rig

POOL, PAGE = 1024, 16
A, B, C = Owner("t:a"), Owner("t:b"), Owner("t:c")
PROMPT = [7] * (4 * PAGE)


def limited(body: str, tokens: int = POOL, page_size: int = PAGE, **changes: Any) -> Rig:
    """Return a rig whose owners have the limits of a policy."""
    rig = make_rig(tokens, page_size, **changes)
    policy = parse_policy(f"version: 1\n{body}", check_supported=False)
    rig.cache.limit([QuotaBook(policy, Tier.HBM, rig.size, 1000)])
    return rig


def text(number: int, pages: int, page_size: int = PAGE) -> list[int]:
    """Return a text that shares nothing with that of another number."""
    return [10_000 + number * 100 + page for page in range(pages) for _ in range(page_size)]


def insert(rig: Rig, owner: Owner, number: int, pages: int) -> None:
    """Serve a request: its owner asks, and holds its pages when it is done."""
    prompt = text(number, pages)
    missing = len(prompt) - rig.hit(prompt, owner)
    with rig.cache.as_requester([owner], {owner: missing}):
        rig.insert(prompt, owner)
    rig.cache.ledger.stop_running(owner, missing)
    rig.cache.enforce_hard_quota(owner)
    check_integrity(rig.cache)
    assert rig.accounted() == rig.size


def held(rig: Rig, owner: Owner) -> int:
    return int(rig.cache.ledger.usage(owner, Tier.HBM).tokens)


# ---- trials


@pytest.mark.parametrize("hard", ["false", "true"])
def test_trial_23_a_flood_leaves_the_quiet_tenant_alone(hard: str) -> None:
    """A floods ten times its quota; it ends within the quota, and B keeps its warm set."""
    rig = limited(f"defaults: {{quota: {{hbm: 50%, hard: {hard}}}}}\ntenants: {{a: {{}}, b: {{}}}}")
    for number in range(4):
        insert(rig, B, 900 + number, 6)
    for number in range(10 * rig.size // 2 // (4 * PAGE)):
        insert(rig, A, number, 4)
        limit = rig.size // 2 if hard == "true" else rig.size - 4 * 6 * PAGE
        assert held(rig, A) <= limit
    assert [rig.hit(text(900 + number, 6), B) for number in range(4)] == [6 * PAGE] * 4
    reasons = {eviction.reason for eviction in rig.cache.evictions}
    assert Reason.QUOTA in reasons
    # One cycle after B comes for its own half, A is back within its quota.
    insert(rig, B, 990, 2)
    for number in range(8):
        insert(rig, B, 1000 + number, 2)
    assert held(rig, A) <= rig.size // 2
    assert held(rig, B) >= rig.size // 2 - 2 * PAGE


def test_trial_23_without_limits_the_same_flood_takes_everything() -> None:
    rig = make_rig(POOL, PAGE)
    insert(rig, B, 900, 6)
    for number in range(16):
        insert(rig, A, number, 4)
    assert rig.hit(text(900, 6), B) == 0


def test_trial_25_an_owner_that_is_in_no_policy_is_served_and_gives_first() -> None:
    rig = limited("tenants: {a: {}, b: {}}")
    insert(rig, A, 1, 10)
    insert(rig, C, 2, 10)
    assert rig.hit(text(2, 10), C) == 10 * PAGE
    assert rig.evict(10 * PAGE) == 10 * PAGE
    assert (held(rig, A), held(rig, C)) == (10 * PAGE, 0)


def test_trial_28_premium_keeps_its_pages_under_a_flood_of_basic() -> None:
    """Premium and standard both hold more than their share: basic gives, then standard."""
    classes = "a: {sla: premium, weight: 2}, b: {sla: basic, weight: 1}, c: {weight: 1}"
    rig = limited(f"defaults: {{quota: {{hbm: 100%}}}}\ntenants: {{{classes}}}")
    for number in range(8):
        insert(rig, A, 900 + number, 4)
    for number in range(5):
        insert(rig, C, 950 + number, 4)
    for number in range(100):
        insert(rig, B, number, 4)
    assert sum(rig.hit(text(900 + number, 4), A) for number in range(8)) == 8 * 4 * PAGE
    assert sum(rig.hit(text(950 + number, 4), C) for number in range(5)) == 4 * 4 * PAGE


def hit_rate(rig: Rig, seed: int) -> dict[str, float]:
    """Serve short and long prompts at twice the pool, and return the share of cached tokens."""
    random = Random(seed)
    asked, cached = {"short": 0, "long": 0}, {"short": 0, "long": 0}
    for _ in range(1500):
        kind = "long" if random.random() < 0.1 else "short"
        number = random.randrange(3 if kind == "long" else 24)
        pages = 64 if kind == "long" else 1
        owner = Owner(f"t:{kind}")
        prompt = text(number + (500 if kind == "long" else 0), pages)
        asked[kind] += len(prompt)
        cached[kind] += rig.hit(prompt, owner)
        rig.insert(prompt, owner)
    rates = {kind: cached[kind] / asked[kind] for kind in asked}
    return rates | {"all": sum(cached.values()) / sum(asked.values())}


def test_trial_35_hit_rate_of_mixed_sizes_by_policy(capsys: Any) -> None:
    """Prompts of 1 and 64 pages by two tenants, working set about twice the pool."""
    pool = 108 * PAGE
    rigs = {
        "sglang lru": make_stock_rig(pool, PAGE),
        "ours, no policy": make_rig(pool, PAGE),
        "ours, quota 50%": limited("tenants: {short: {}, long: {}}", pool),
        "ours, reserve 25%": limited("tenants: {short: {reserve: {hbm: 25%}}, long: {}}", pool),
    }
    rates = {name: hit_rate(rig, 1) for name, rig in rigs.items()}
    with capsys.disabled():
        for name, found in rates.items():
            print(f"\n{name:18}", *(f"{kind} {rate:6.1%}" for kind, rate in found.items()), end="")
        print()
    assert rates["ours, no policy"] == rates["sglang lru"]
    # Long prompts no longer push the short ones out.
    assert rates["ours, quota 50%"]["short"] > rates["sglang lru"]["short"] + 0.05
    assert rates["ours, quota 50%"]["short"] > 0.95
    assert rates["ours, reserve 25%"]["short"] > 0.95


def test_trial_37_a_pinned_prefix_outlives_a_flood_and_its_expiry_needs_no_traffic() -> None:
    rig = limited("tenants: {a: {}, b: {}}")
    now = [1000]
    rig.cache.clock._read = lambda: now[0]
    rig.cache.clock.now_ms = 0
    rig.cache.tick()
    insert(rig, A, 1, 8)
    answer = rig.cache.pin_prefix(rig.key(text(1, 8), A), A, expires_ms=5000)
    assert (answer.tokens, answer.cached) == (8 * PAGE, 8 * PAGE)
    for number in range(2, 5770 // 10):
        owner = B if number % 2 else A
        with rig.cache.as_requester([owner]):
            rig.insert(text(number, 4), owner)
        check_integrity(rig.cache) if number % 50 == 0 else None
    assert rig.hit(text(1, 8), A) == 8 * PAGE
    assert rig.cache.ledger.usage(A, Tier.HBM).protected == 8 * PAGE
    now[0] = 5000
    rig.cache.tick()
    assert rig.cache.ledger.usage(A, Tier.HBM).protected == 0
    assert rig.cache.evictable_size() + rig.allocator.available_size() == rig.size


def test_trial_37_over_budget_only_what_fits_is_pinned() -> None:
    rig = limited("tenants: {a: {quota: {hbm: 160tok}}, b: {reserve: {hbm: 50%}}}")
    insert(rig, A, 1, 8)
    insert(rig, A, 2, 8)
    first = rig.cache.pin_prefix(rig.key(text(1, 8), A), A)
    second = rig.cache.pin_prefix(rig.key(text(2, 8), A), A)
    third = rig.cache.pin_prefix(rig.key(text(2, 8), A), A)
    assert (first.tokens, second.tokens, second.cached) == (128, 32, 128)
    assert rig.cache.pins.tokens(A) == 160
    assert third.tokens == 32, "what is pinned already costs nothing"
    check_integrity(rig.cache)
    assert rig.cache.pins.remove_all(A) == 3
    assert rig.cache.pins.tokens(A) == 0
    assert rig.cache.protected_size() == 0
    assert rig.cache.pins.remove_all() == 0


def test_pins_leave_the_reserves_of_others_alone() -> None:
    rig = limited("tenants: {a: {quota: {hbm: 100%}}, b: {reserve: {hbm: 50%}}}")
    insert(rig, A, 1, 48)
    answer = rig.cache.pin_prefix(rig.key(text(1, 48), A), A)
    assert answer.tokens == rig.size // 2
    assert rig.cache.headroom(B) >= rig.size // 2


def test_a_flush_ends_all_pins_and_is_counted() -> None:
    rig = limited("tenants: {a: {}}")
    insert(rig, A, 1, 4)
    pin = rig.cache.pin_prefix(rig.key(text(1, 4), A), A, expires_ms=1 << 60).pin
    rig.cache.reset()
    rig.allocator.clear()
    assert not rig.cache.pins.remove(pin)
    assert rig.cache.evictions[Eviction(A, Tier.HBM, Reason.FLUSH)] == 4 * PAGE
    insert(rig, A, 1, 4)


def test_trial_40_share_of_each_tenant_can_be_set_and_seen() -> None:
    rig = limited("tenants: {a: {quota: {hbm: 25%}, reserve: {hbm: 10%}}, b: {}}")
    insert(rig, A, 1, 4)
    assert rig.cache.limits(A) == OwnerLimits(rig.size // 4, reserve=rig.size // 10)
    assert rig.cache.limits(B) == OwnerLimits(rig.size // 2)
    assert rig.cache.limits(B, Tier.CPU) == OwnerLimits()
    assert held(rig, A) == 4 * PAGE
    rig.cache.ledger.bytes_per_token = 100
    assert rig.cache.ledger.bytes(A, Tier.HBM) == 400 * PAGE


# ---- reserves


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


# ---- hard quotas and refusals


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


# ---- what was promised can be freed


RANDOM_POLICIES = [
    "{a: {reserve: {hbm: 30%}}, b: {reserve: {hbm: 20%}, weight: 3}, c: {sla: basic}}",
    "{a: {reserve: {hbm: 100tok}}, b: {quota: {hbm: 30%, hard: true}}, c: {reserve: {hbm: 50%}}}",
    "{a: {reserve: {hbm: 50%}}, b: {reserve: {hbm: 50%}}, c: {quota: {hbm: 100%}}}",
]


class Scheduler:
    """Admits, computes, inserts and ends random requests as SGLang's loop does."""

    def __init__(self, rig: Rig, random: Random) -> None:
        self.rig, self.random = rig, random
        self.running: list[tuple[Owner, list[int], int, Any, Any]] = []
        self.admitted = 0

    def step(self) -> None:
        cache = self.rig.cache
        counts: dict[Owner, int] = {}
        for owner, _, _, slots, _ in self.running:
            counts[owner] = counts.get(owner, 0) + len(slots)
        cache.ledger.set_running(counts)
        batch = list(self.admit())
        incoming = {owner: 0 for owner, *_ in batch}
        for owner, tokens, cached, _ in batch:
            incoming[owner] += len(tokens) - cached
        with cache.as_requester(incoming, incoming if self.random.random() < 0.7 else None):
            for owner, tokens, cached, lock in batch:
                slots = self.alloc(len(tokens) - cached)
                self.running.append((owner, tokens, cached, slots, lock))
        while self.running and self.random.random() < 0.5:
            self.finish(self.random.randrange(len(self.running)))

    def admit(self) -> Iterator[tuple[Owner, list[int], int, Any]]:
        """Yield requests as long as the promises, taken one by one, cover all of them."""
        cache, wanted = self.rig.cache, 0
        for _ in range(self.random.randint(0, 4)):
            owner = self.random.choice([A, B, C])
            tokens = self.prompt()
            found = self.rig.match(tokens, owner)
            lock = cache.lock(found.last_device_node)
            missing = len(tokens) - found.device_prefix_len
            with cache.as_requester([owner]):
                room = self.rig.allocator.available_size() + cache.evictable_size()
            if wanted + missing <= room:
                wanted += missing
                self.admitted += 1
                yield owner, tokens, found.device_prefix_len, lock
            else:
                cache.unlock(lock)

    def prompt(self) -> list[int]:
        prompt = list(PROMPT) if self.random.random() < 0.4 else []
        for _ in range(self.random.randint(1, 14)):
            prompt += [self.random.randint(1, 3)] * PAGE
        return prompt

    def alloc(self, tokens: int) -> Any:
        short = tokens - self.rig.allocator.available_size()
        if short > 0:
            self.rig.cache.evict_for_alloc(EvictParams(num_tokens=short))
        slots = self.rig.allocator.alloc(tokens) if tokens else []
        assert slots is not None, f"{tokens} tokens were promised"
        return slots

    def finish(self, index: int) -> None:
        owner, tokens, cached, slots, lock = self.running.pop(index)
        cache = self.rig.cache
        if len(slots):
            self.rig.allocator.free_segment(slots, start_pos=0)
            cache.ledger.stop_running(owner, len(slots))
        cache.unlock(lock)
        with cache.as_requester([owner]):
            room = self.rig.allocator.available_size() + cache.evictable_size()
            missing = len(tokens) - self.rig.hit(tokens, owner)
            if missing <= min(room, cache.headroom(owner)):
                self.rig.insert(tokens, owner)
        cache.enforce_hard_quota(owner)

    def check(self) -> None:
        rig = self.rig
        check_integrity(rig.cache)
        uncached = sum(len(slots) for _, _, _, slots, _ in self.running)
        assert rig.accounted() + uncached == rig.size
        for owners in ([], [A], [B, C]):
            with rig.cache.as_requester(owners):
                assert 0 <= rig.cache.evictable_size() <= rig.core.evictable_size()


@pytest.mark.parametrize("public", [False, True])
@pytest.mark.parametrize("policy", RANDOM_POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_what_was_promised_to_each_request_is_there_for_the_batch(
    policy: str, public: bool, seed: int
) -> None:
    rig = limited(f"tenants: {policy}", 60 * PAGE, public=[PROMPT] if public else None)
    scheduler = Scheduler(rig, Random(f"{policy} {public} {seed}"))
    floors = {owner: rig.cache.limits(owner).reserve for owner in (A, B, C)}
    for _ in range(250):
        scheduler.step()
        scheduler.check()
    assert scheduler.admitted > 100
    # Everything that is promised to nobody in particular can be freed, and no reserve is touched.
    before = {owner: held(rig, owner) for owner in floors}
    promised = rig.cache.evictable_size()
    assert rig.evict(promised) >= promised
    for owner, floor in floors.items():
        assert held(rig, owner) >= min(floor, before[owner])
    check_integrity(rig.cache)


@pytest.mark.parametrize("seed", range(4))
def test_every_promise_is_kept_to_the_last_token(seed: int) -> None:
    """Freeing all that was promised frees it, for any requesters, after any workload."""
    random = Random(seed)
    for round_ in range(12):
        rig = limited(f"tenants: {RANDOM_POLICIES[round_ % 3]}", 60 * PAGE, public=[PROMPT])
        scheduler = Scheduler(rig, random)
        for _ in range(25):
            scheduler.step()
        with rig.cache.as_requester(random.sample([A, B, C], random.randint(0, 3))):
            promised = rig.cache.evictable_size()
            assert rig.evict(promised) >= promised
        scheduler.check()

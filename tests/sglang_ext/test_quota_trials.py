"""Trials 23, 25, 28, 35, 37 and 40 on SGLang's real cache, and pins."""

from random import Random
from typing import Any

import pytest

from sglang_ext.radix.integrity import check_integrity
from sglang_ext.radix.order import Reason
from sglang_ext.radix.victims import Eviction
from sglang_ext.types import Owner, OwnerLimits, Tier
from tests.radix.caches import Rig, make_rig, make_stock_rig
from tests.sglang_ext.quota_rigs import PAGE, POOL, A, B, C, held, insert, limited, text


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

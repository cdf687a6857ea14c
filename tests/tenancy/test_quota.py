"""Sizes of the policy as tokens of a tier, for every owner."""

import pytest

from sglang_ext.errors import PolicyError
from sglang_ext.tenancy.loader import parse_policy
from sglang_ext.tenancy.quota import QuotaBook
from sglang_ext.types import PUBLIC, Owner, OwnerLimits, Tier

CAPACITY = 20_000
BYTES_PER_TOKEN = 1_000


def book(body: str, tier: Tier = Tier.HBM, bytes_per_token: int = BYTES_PER_TOKEN) -> QuotaBook:
    policy = parse_policy(f"version: 1\n{body}", check_supported=False)
    return QuotaBook(policy, tier, CAPACITY, bytes_per_token)


def limits(fields: str, tier: Tier = Tier.HBM) -> OwnerLimits:
    return book(f"tenants: {{acme: {{{fields}}}}}", tier).limits(Owner("t:acme"))


def message(body: str, bytes_per_token: int = BYTES_PER_TOKEN) -> str:
    with pytest.raises(PolicyError) as caught:
        book(body, bytes_per_token=bytes_per_token)
    return str(caught.value)


@pytest.mark.parametrize(
    ("size", "tokens"),
    [("25%", 5000), ("3MB", 3000), ("2ktok", 2000), ("1500B", 1), ("0.004%", 0), ("1GB", 10**6)],
)
def test_every_unit_becomes_tokens(size: str, tokens: int) -> None:
    assert limits(f"quota: {{hbm: {size}}}").quota == tokens


def test_each_tier_has_its_own_sizes() -> None:
    fields = "quota: {hbm: 10%, cpu: 20%}, reserve: {cpu: 5%}"
    assert limits(fields) == OwnerLimits(quota=2000)
    assert limits(fields, Tier.CPU) == OwnerLimits(quota=4000, reserve=1000)


def test_half_of_the_tier_where_the_policy_says_nothing() -> None:
    assert limits("") == OwnerLimits(quota=CAPACITY // 2)
    assert limits("quota: {hard: true}") == OwnerLimits(quota=CAPACITY // 2, hard=True)
    assert limits("reserve: {hbm: 70%}") == OwnerLimits(quota=14_000, reserve=14_000)
    assert limits("quota: {hbm: 100%}").quota == CAPACITY


def test_class_and_weight() -> None:
    ranks = [limits(f"sla: {sla}").rank for sla in ("basic", "standard", "premium")]
    assert ranks == [0, 1, 2]
    assert limits("weight: 0.2").weight == 0.2


def test_system_and_public_text_have_no_quota() -> None:
    made = book("defaults: {quota: {hbm: 10%, hard: true}, reserve: {hbm: 1%}}")
    assert made.limits(PUBLIC) == OwnerLimits()
    assert made.limits(Owner("t:system")) == OwnerLimits()


def test_a_group_counts_once() -> None:
    member = "isolation: shared, group: g, reserve: {hbm: 30%}"
    made = book(f"tenants: {{a: {{{member}}}, b: {{{member}}}, c: {{reserve: {{hbm: 30%}}}}}}")
    assert made.reserved == 12_000
    assert set(made.owners) == {PUBLIC, "t:system", "g:g", "t:c"}


def test_an_owner_that_the_policy_no_longer_knows_gives_first() -> None:
    assert book("").limits(Owner("t:gone")) == OwnerLimits(quota=0, rank=0)


def test_reserves_above_the_capacity_of_the_engine() -> None:
    assert message("tenants: {a: {quota: {hbm: 50MB}, reserve: {hbm: 30MB}}}") == (
        "tenants.a.reserve.hbm: 30MB is 30000 tokens, "
        "expected at most the 20000 tokens of the hbm tier"
    )
    two = "tenants: {a: {reserve: {hbm: 15MB}}, b: {reserve: {hbm: 30%}}}"
    assert message(two) == (
        "tenants: reserve.hbm of all tenants sums to 21000 tokens, "
        "expected at most the 20000 tokens of the hbm tier"
    )


def test_reserve_above_the_own_quota_in_another_unit() -> None:
    assert message("tenants: {a: {quota: {hbm: 3MB}, reserve: {hbm: 20%}}}") == (
        "tenants.a.reserve.hbm: 4000 tokens, expected at most the tenant's own quota of 3000"
    )


def test_bytes_where_nobody_knows_the_size_of_a_token() -> None:
    text = message("tenants: {a: {quota: {hbm: 1GB}}}", bytes_per_token=0)
    assert text.startswith("tenants.a.quota.hbm: found 1GB, but this engine does not say")
    assert book("tenants: {a: {quota: {hbm: 10%}}}", bytes_per_token=0)

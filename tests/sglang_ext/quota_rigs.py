"""Small caches with the limits of a policy, and requests of their tenants."""

from typing import Any

from sglang_ext.radix.integrity import check_integrity
from sglang_ext.tenancy.loader import parse_policy
from sglang_ext.tenancy.quota import QuotaBook
from sglang_ext.types import Owner, Tier
from tests.radix.caches import Rig, make_rig

__all__ = ["PAGE", "POOL", "PROMPT", "A", "B", "C", "held", "insert", "limited", "text"]

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

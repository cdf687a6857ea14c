"""The ledger against a plain counter."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.radix.ledger import Ledger, Usage
from sglang_ext.types import Owner, Tier

A, B = Owner("t:a"), Owner("t:b")
CHANGES = st.tuples(
    st.sampled_from([A, B]), st.sampled_from(list(Tier)), st.integers(0, 9), st.integers(0, 9)
)


@given(st.lists(CHANGES))
def test_usage_is_the_sum_of_what_was_booked(changes: list[tuple[Owner, Tier, int, int]]) -> None:
    ledger, evictable, protected = Ledger(), Counter[object](), Counter[object]()
    for owner, tier, free, kept in changes:
        ledger.book(owner, tier, free, kept)
        evictable[owner, tier] += free
        protected[owner, tier] += kept
    for owner in (A, B):
        for tier in Tier:
            usage = ledger.usage(owner, tier)
            assert usage == Usage(evictable[owner, tier], protected[owner, tier])


def test_an_owner_that_holds_nothing_is_forgotten() -> None:
    ledger = Ledger()
    ledger.book(A, Tier.HBM, 16, 0)
    ledger.book(A, Tier.HBM, -16, 16)
    ledger.book(A, Tier.HBM, 0, -16)
    assert list(ledger) == []


def test_running_tokens_are_replaced_and_survive_a_flush() -> None:
    ledger = Ledger(bytes_per_token=10)
    ledger.book(A, Tier.HBM, 16, 0)
    ledger.set_running({A: 5, B: 7})
    assert ledger.usage(A, Tier.HBM) == Usage(16, 0, 5)
    assert ledger.bytes(A, Tier.HBM) == 210
    ledger.set_running({B: 8})
    assert ledger.usage(A, Tier.HBM) == Usage(16, 0, 0)
    ledger.clear()
    assert [(owner, usage.running) for owner, _, usage in ledger] == [(B, 8)]
    ledger.set_running({})
    assert list(ledger) == []

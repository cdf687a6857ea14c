"""Token-seconds: exact, against a ledger that is read every millisecond."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.radix.ledger import Ledger
from sglang_ext.tiering.token_time import Held, TokenTime
from sglang_ext.types import Owner, Tier

OWNERS = [Owner("t:a"), Owner("t:b"), Owner("")]
TIERS = [Tier.HBM, Tier.CPU]
changes = st.tuples(
    st.sampled_from(["book", "start", "stop", "set", "clear", "wait"]),
    st.sampled_from(OWNERS),
    st.sampled_from(TIERS),
    st.integers(1, 64),
)


def apply(ledger: Ledger, change: tuple[str, Owner, Tier, int]) -> None:
    kind, owner, tier, tokens = change
    if kind == "book":
        free = min(tokens, ledger.usage(owner, tier).evictable)
        ledger.book(owner, tier, tokens - 2 * free if tokens % 2 else tokens, tokens // 2)
    elif kind == "start":
        ledger.start_running(owner, tokens)
    elif kind == "stop":
        ledger.stop_running(owner, tokens)
    elif kind == "set":
        ledger.set_running({owner: tokens})
    elif kind == "clear":
        ledger.clear()


@given(st.lists(changes, max_size=60))
def test_the_area_is_what_a_count_every_millisecond_adds_up(
    story: list[tuple[str, Owner, Tier, int]],
) -> None:
    ledger, time, now = Ledger(), TokenTime(), 7
    naive: Counter[Held] = Counter()
    for change in story:
        apply(ledger, change)
        if change[0] != "wait":
            continue
        time.settle(ledger.changed, ledger.tokens, now)
        ledger.changed.clear()
        for _ in range(change[3]):
            naive.update({(owner, tier): usage.tokens for owner, tier, usage in ledger})
        now += change[3]
        found = dict(time.totals(now))
        assert {held: round(1000 * area) for held, area in found.items() if area} == +naive


def test_what_nobody_touches_goes_on_growing() -> None:
    time = TokenTime()
    held = (Owner("t:a"), Tier.HBM)
    time.settle([held], lambda _: 100, 1000)
    assert dict(time.totals(3500)) == {held: 250.0}
    assert dict(time.totals(4000)) == {held: 300.0}

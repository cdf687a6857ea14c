"""One conversation through HBM, CPU and NVMe, on SGLang's own cache and pools (trial 39)."""

from array import array
from pathlib import Path

import pytest
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_ext.lifespans import Lifespans
from sglang_ext.prefix_flush import flush_prefix
from sglang_ext.radix.integrity import check_integrity, walk
from sglang_ext.radix.order import Reason
from sglang_ext.radix.sessions import Session, SessionId, text_of
from sglang_ext.radix.victims import Eviction
from sglang_ext.request_tag import RequestTag
from sglang_ext.sessions import close, held, pause, what_returns
from sglang_ext.tiering.placement import Lifetime
from sglang_ext.types import Owner, TenantId, Tier
from tests.radix.caches import make_rig, namespace
from tests.sglang_ext.test_prefix_cache import Request
from tests.sglang_ext.tiered import PAGE, TieredRig, tiered

A = TenantId("a")
COMMON = [1] * 8
S = [*COMMON, *[2] * 8]
T = [*COMMON, *[3] * 8]


def ask(rig: TieredRig, tokens: list[int], session: str = "", owner: str = "t:a") -> None:
    """Send a request of a session, and let its pages go down."""
    rig.write(tokens, owner)
    if session:
        node = rig.core.node_by_id(rig.match(tokens, owner).last_device_node)
        rig.cache.sessions.use(SessionId(A, session), Owner(owner), node, rig.cache.clock.now_ms)


def find(rig: TieredRig, name: str) -> Session:
    session = rig.cache.sessions.find(SessionId(A, name))
    assert session is not None
    return session


def disk_pages(rig: TieredRig) -> int:
    """Return how many pages the store holds."""
    store = rig.cache.store
    assert store is not None
    return len(store.backend.store._space.index)


def leave_memory(rig: TieredRig) -> None:
    rig.evict(10**6)
    rig.cache.evict_host(10**6)
    rig.settle()


def in_tiers(hbm: int, cpu: int, nvme: int) -> dict[Tier, int]:
    return {Tier.HBM: hbm, Tier.CPU: cpu, Tier.NVME: nvme}


@pytest.mark.trial(39)
def test_a_closed_session_leaves_nothing_of_its_own_in_any_tier(tmp_path: Path) -> None:
    with tiered(tmp_path) as rig:
        ask(rig, S, "s")
        ask(rig, T, "t")
        session, before = find(rig, "s"), disk_pages(rig)
        assert held(rig.cache, session) == in_tiers(8, 8, 8)
        flushed = close(rig.cache, session)
        check_integrity(rig.cache)
        assert flushed.freed == {Tier.HBM: 8, Tier.CPU: 8}
        assert not any(flushed.in_use.values())
        assert flushed.disk_bytes > 0
        assert disk_pages(rig) == before - 2
        assert held(rig.cache, session) == in_tiers(0, 0, 0)
        assert rig.cache.sessions.find(session.id) is None
        assert rig.where(S) == (8, 0)
        assert rig.where(T) == (16, 0), "what the other session uses is there"
        assert rig.cache.evictions[Eviction(Owner("t:a"), Tier.HBM, Reason.FLUSH)] == 8
        assert held(rig.cache, find(rig, "t")) == in_tiers(16, 16, 16), "all of it"


@pytest.mark.trial(39)
def test_pages_on_disk_alone_go_too_and_what_others_had_stays(tmp_path: Path) -> None:
    with tiered(tmp_path) as rig:
        ask(rig, S, "s")
        ask(rig, T, "t")
        leave_memory(rig)
        assert not list(walk(rig.core))
        session = find(rig, "s")
        assert held(rig.cache, session) == in_tiers(0, 0, 8)
        assert close(rig.cache, session).disk_bytes > 0
        assert disk_pages(rig) == 4
        assert held(rig.cache, find(rig, "t")) == in_tiers(0, 0, 16)
        close(rig.cache, find(rig, "t"))
        assert disk_pages(rig) == 0


def test_what_is_in_use_is_said_and_goes_with_the_next_call() -> None:
    with tiered() as rig:
        ask(rig, S, "s")
        lock = rig.cache.lock(rig.match(S).last_device_node)
        flushed = close(rig.cache, find(rig, "s"))
        assert flushed.freed == {Tier.HBM: 0, Tier.CPU: 0}
        assert flushed.in_use == {Tier.HBM: 16, Tier.CPU: 16}
        rig.cache.unlock(lock)
        assert close(rig.cache, find(rig, "s")).freed == {Tier.HBM: 16, Tier.CPU: 16}
        check_integrity(rig.cache)


def test_a_paused_session_lies_in_cpu_and_frees_its_hbm() -> None:
    with tiered() as rig:
        ask(rig, S, "s")
        ask(rig, T, "t")
        flushed = pause(rig.cache, find(rig, "s"), Tier.CPU)
        rig.settle()
        assert (flushed.freed, flushed.in_use) == ({Tier.HBM: 8}, {Tier.HBM: 0})
        assert rig.where(S) == (8, 8)
        assert rig.where(T) == (16, 0)


def test_a_page_without_a_copy_is_copied_before_its_hbm_is_freed() -> None:
    with tiered() as rig:
        rig.cache.write_through_threshold = 10**9
        ask(rig, S, "s")
        first = pause(rig.cache, find(rig, "s"), Tier.CPU)
        assert first.in_use[Tier.HBM] == 16
        rig.settle()
        assert pause(rig.cache, find(rig, "s"), Tier.CPU).freed == {Tier.HBM: 16}
        assert rig.where(S) == (0, 16)


def test_a_session_paused_to_the_disk_leaves_memory_and_its_text_is_known(tmp_path: Path) -> None:
    with tiered(tmp_path) as rig:
        ask(rig, S, "s")
        flushed = pause(rig.cache, find(rig, "s"), Tier.NVME)
        assert flushed.freed == {Tier.HBM: 16, Tier.CPU: 16}
        assert not any(flushed.in_use.values())
        assert not list(walk(rig.core))
        assert held(rig.cache, find(rig, "s")) == in_tiers(0, 0, 16)
        back = what_returns(rig.cache, find(rig, "s"))
        assert back is not None
        assert (back.token_ids, back.tiers) == (S, in_tiers(0, 0, 16))


def test_what_the_disk_does_not_have_stays_in_cpu(tmp_path: Path) -> None:
    with tiered(tmp_path) as rig:
        ask(rig, S, "s")
        node = rig.core.node_by_id(rig.match(S).last_device_node)
        rig.cache.store.delete_pages(Owner("t:a"), node.hash_value[1:])
        flushed = pause(rig.cache, find(rig, "s"), Tier.NVME)
        assert flushed.freed == {Tier.HBM: 16, Tier.CPU: 0}
        assert flushed.in_use[Tier.CPU] == 16
        assert rig.where(S) == (0, 16)


def test_what_returns_says_where_each_part_is(tmp_path: Path) -> None:
    with tiered(tmp_path) as rig:
        assert what_returns(rig.cache, Session(SessionId(A, "new"), Owner("t:a"))) is None
        ask(rig, S, "s")
        back = what_returns(rig.cache, find(rig, "s"))
        assert back is not None
        assert (back.token_ids, back.tiers) == (S, in_tiers(16, 0, 0))
        assert (back.client_key, back.cache_salt) == ("", None)
        rig.evict(8)
        rig.settle()
        back = what_returns(rig.cache, find(rig, "s"))
        assert back is not None
        assert back.tiers == in_tiers(0, 16, 0)
        leave_memory(rig)
        rig.cache.store.delete_owner(Owner("t:a"))
        assert what_returns(rig.cache, find(rig, "s")) is None


def key(tokens: list[int], owner: str = "t:a") -> RadixKey:
    return RadixKey(array("q", tokens), namespace(owner))


def test_a_prefix_goes_with_all_that_continues_it_and_pins(tmp_path: Path) -> None:
    with tiered(tmp_path) as rig:
        other = [9] * 16
        for tokens in (S, T, other):
            ask(rig, tokens)
        rig.write(S, "t:b")
        rig.cache.pin_prefix(key(S), Owner("t:a"))
        flushed = flush_prefix(rig.cache, key([*COMMON, 2]))
        check_integrity(rig.cache)
        assert flushed.freed == {Tier.HBM: 24, Tier.CPU: 24}
        assert flushed.disk_bytes > 0
        assert (rig.where(S), rig.where(T), rig.where(other)) == ((0, 0), (0, 0), (16, 0))
        assert rig.where(S, "t:b") == (16, 0)
        assert disk_pages(rig) == 8


def test_of_a_longer_prefix_only_what_others_do_not_need_goes(tmp_path: Path) -> None:
    with tiered(tmp_path) as rig:
        ask(rig, S)
        ask(rig, T)
        assert flush_prefix(rig.cache, key(S)).freed == {Tier.HBM: 8, Tier.CPU: 8}
        assert rig.where(T) == (16, 0)
        assert disk_pages(rig) == 4


@pytest.mark.parametrize("public", [[], [COMMON]])
def test_a_prefix_on_disk_alone_goes_too(tmp_path: Path, public: list[list[int]]) -> None:
    with tiered(tmp_path, public) as rig:
        ask(rig, S)
        leave_memory(rig)
        before = disk_pages(rig)
        assert flush_prefix(rig.cache, key(S)).disk_bytes > 0
        gone = 2 if public else 4
        assert disk_pages(rig) == before - gone


@pytest.mark.parametrize("tokens", [[], [1, 1, 1], COMMON], ids=["empty", "short", "public"])
def test_a_prefix_without_a_page_of_its_own_is_refused(tokens: list[int]) -> None:
    rig = make_rig(64, PAGE, [COMMON])
    with pytest.raises(ValueError, match="no whole page of 4 tokens"):
        flush_prefix(rig.cache, key(tokens))


@pytest.mark.parametrize("lives", [True, False])
def test_a_request_anchors_its_session_as_it_is_computed(lives: bool) -> None:
    """As the scheduler calls it, chunk by chunk; the last anchor is where the answer ended."""
    rig = TieredRig(make_rig(64, PAGE, [COMMON]).cache)
    rig.cache.lifespans = Lifespans(rig.cache, {}) if lives else None
    request = Request(rig, [*COMMON, *[2] * 8], namespace("t:a"), 1)
    request.rid, request.kv_tag = "a/1", RequestTag("s", 500)
    request.admit()
    for end in (4, 12, 16):
        request.compute(end)
        request.checkpoint(end)
    request.finish([5] * 6)
    session = find(rig, "s")
    (anchor,) = session.anchors
    assert list(text_of(anchor).tokens) == [*COMMON, *[2] * 8, *[5] * 4]
    assert held(rig.cache, session)[Tier.HBM] == 12
    check_integrity(rig.cache)
    rig.later(500)
    assert held(rig.cache, session)[Tier.HBM] == (0 if lives else 12)


def test_a_request_that_leaves_nothing_has_no_session() -> None:
    rig = TieredRig(make_rig(64, PAGE).cache)
    request = Request(rig, [2] * 8, namespace("t:a"), 1)
    request.rid, request.kv_tag, request.skip_radix_cache_insert = "a/1", RequestTag("s"), True
    request.admit()
    request.compute(8)
    request.checkpoint(8)
    assert rig.cache.sessions.of(A) == []


def traces(rig: TieredRig, name: str) -> int:
    """Return how many tokens and pages of a session are remembered though they left memory."""
    session = find(rig, name)
    return len(session.lost) + (0 if session.text is None else len(session.text.tokens))


def test_no_trace_of_what_was_flushed_is_remembered(tmp_path: Path) -> None:
    with tiered(tmp_path) as rig:
        ask(rig, S, "s")
        leave_memory(rig)
        assert traces(rig, "s") == 4 + 16
        flush_prefix(rig.cache, key(COMMON))
        assert find(rig, "s").text is None
        ask(rig, T, "t")
        flush_prefix(rig.cache, key(COMMON))
        assert find(rig, "t").text is None
        ask(rig, S, "s")
        rig.cache.flush(Owner("t:a"))
        assert rig.cache.sessions.of(A) == []


def test_no_trace_of_a_shorter_life_is_remembered(tmp_path: Path) -> None:
    with tiered(tmp_path) as rig:
        rig.cache.lifespans = Lifespans(rig.cache, {})
        for leave in (lambda: rig.later(300), lambda: leave_memory(rig)):
            ask(rig, S, "s")
            node = rig.core.node_by_id(rig.match(S).last_device_node)
            rig.cache.lifespans.used(node, Owner("t:a"), 300)
            leave()
            assert not list(walk(rig.core))
            assert traces(rig, "s") == 0


def test_a_conversation_that_ended_long_ago_is_forgotten() -> None:
    rig = TieredRig(make_rig(64, PAGE).cache)
    life = Lifetime(hbm_ms=1000, cpu_ms=1000, nvme_ms=1000)
    rig.cache.lifespans = Lifespans(rig.cache, {Owner("t:a"): life})
    ask(rig, S, "s")
    rig.later(600)
    ask(rig, T, "t")
    rig.later(600)
    assert [session.id.name for session in rig.cache.sessions.of(A)] == ["t"]
    ask(rig, S, "u", "t:unknown")
    rig.later(10**9)
    assert [session.id.name for session in rig.cache.sessions.of(A)] == ["u"]

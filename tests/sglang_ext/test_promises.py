"""What the cache promises to a request can be freed for its batch, whatever happened before."""

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_ext.radix.integrity import check_integrity
from sglang_ext.types import Owner
from tests.radix.caches import Rig
from tests.sglang_ext.quota_rigs import PAGE, PROMPT, A, B, C, held, limited

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

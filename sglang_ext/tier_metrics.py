"""Metrics of the tiers: what left them and why, and what the store below met with."""

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from sglang_ext.metrics import HeldMetrics, TenantLabels
from sglang_ext.observe.catalog import make
from sglang_ext.observe.usage import HeldUsage
from sglang_ext.tiering.token_time import Held, TokenTime
from sglang_ext.types import Owner, Tier

__all__ = ["TierMetrics", "capacities", "on_disk"]

_BYTES = "_bytes"
_LOSSES = ("corrupt", "truncated", "not_a_page", "io_error", "no_space", "timeout")


def on_disk(cache: Any) -> dict[tuple[Owner, Tier], int]:
    """Return the tokens of each owner on the disk; empty without an NVMe tier. O(owners)."""
    store = cache.store
    if store is None:
        return {}
    held = store.held_bytes().items()
    return {(owner, Tier.NVME): taken // store.bytes_per_token for owner, taken in held}


def capacities(cache: Any) -> dict[Tier, int]:
    """Return the tokens that each tier of a cache can hold. O(1)."""
    pools = {Tier.HBM: cache.token_to_kv_pool_allocator, Tier.CPU: cache.host_pool_group}
    found = {tier: int(pool.size) for tier, pool in pools.items() if pool is not None}
    if cache.store is not None:
        total = cache.store.backend.config.caps.total_bytes
        found[Tier.NVME] = int(total // cache.store.bytes_per_token)
        remote = cache.store.remote
        if remote is not None:
            found[Tier.REMOTE] = remote.total_bytes // remote.bytes_per_token
    return found


def held_bytes(cache: Any) -> dict[tuple[Owner, Tier], int]:
    """Return the bytes of each owner in each tier, of all ranks together. O(owners).

    In the remote tier those of all servers, as far as this one knows.
    """
    ranks, token = cache.tp_world_size, cache.ledger.bytes_per_token
    held = {(owner, tier): usage.tokens * token * ranks for owner, tier, usage in cache.ledger}
    if cache.store is None:
        return held
    held |= {(owner, Tier.NVME): taken * ranks for owner, taken in cache.store.held_bytes().items()}
    remote = {} if cache.store.remote is None else cache.store.remote.held_bytes()
    return held | {(owner, Tier.REMOTE): taken for owner, taken in remote.items()}


class DiskTime:
    """Token-seconds on the disk, whose changes nobody tells: one look at each publication."""

    def __init__(self) -> None:
        self._time = TokenTime()

    def totals(self, cache: Any, now_ms: int) -> Iterator[tuple[Held, float]]:
        """Look, and yield the token-seconds of everybody who ever was seen there. O(owners)."""
        seen = on_disk(cache)
        known = [held for held, _ in self._time.totals(now_ms)]
        self._time.settle([*known, *seen], lambda held: seen.get(held, 0), now_ms)
        yield from self._time.totals(now_ms)


class TierMetrics:
    """Turns totals that only grow into Prometheus counters.

    prometheus_client is imported here, after SGLang has chosen its folder for several processes.
    """

    def __init__(self, owner_limit: int, usage: HeldUsage | None = None) -> None:
        """``usage`` takes in token-seconds for bills."""
        self._usage = usage
        self._labels = TenantLabels(owner_limit)
        self._evicted = make("evicted_tokens_total")
        self._events = make("store_events_total")
        self._event_bytes = make("store_bytes_total")
        self._capacity = make("tier_capacity_tokens")
        self._bytes = HeldMetrics(owner_limit, "held_bytes")
        self._token_seconds = make("token_seconds_total")
        self._moved = {name: make(f"moved_{name}_total") for name in ("bytes", "seconds")}
        self._fetched = make("fetched_tokens_total")
        self._ready = make("fetch_ready_seconds")
        self._choices = make("load_choices_total")
        self._disk_time = DiskTime()
        self._seen: dict[str, dict[Hashable, float]] = {}

    def publish(self, cache: Any) -> None:
        """Add what happened since the last time. O(owners)."""
        for tier, tokens in capacities(cache).items():
            self._capacity.labels(tier.value).set(tokens)
        self._bytes.publish(held_bytes(cache))
        self._publish_token_seconds(cache)
        self._publish_moves(cache)
        for eviction, tokens in self._news("evicted", cache.evictions):
            owner = self._labels.of(eviction.owner or "public", tokens)
            self._evicted.labels(owner, eviction.tier.value, eviction.reason.value).inc(tokens)
        self._publish_events({} if cache.store is None else cache.store.counters())

    def _publish_token_seconds(self, cache: Any) -> None:
        now_ms = cache.clock.now_ms
        areas = dict(cache.token_time.totals(now_ms)) | dict(self._disk_time.totals(cache, now_ms))
        for (owner, tier), seconds in self._news("area", areas):
            label = self._labels.of(owner or "public", 0)
            self._token_seconds.labels(label, tier.value).inc(seconds)
        if self._usage is not None:
            self._usage.publish(areas)

    def _publish_events(self, totals: Mapping[str, int]) -> None:
        # An alert sees no first increment of a series that begins with it.
        for event in _LOSSES if totals else ():
            self._events.labels(event)
        for event, count in self._news("event", totals):
            if event.endswith(_BYTES):
                self._event_bytes.labels(event.removesuffix(_BYTES)).inc(count)
            else:
                self._events.labels(event).inc(count)

    def _publish_moves(self, cache: Any) -> None:
        for name, moved in (("bytes", cache.moved_bytes), ("seconds", cache.moved_seconds)):
            for (origin, goal), amount in self._news(name, moved):
                self._moved[name].labels(origin.value, goal.value).inc(amount)
        for outcome, tokens in self._news("fetched", cache.fetched):
            self._fetched.labels(outcome.value).inc(tokens)
        for (tier, choice), count in self._news("choice", cache.choices):
            self._choices.labels(tier.value, choice.value).inc(count)
        while cache.ready_seconds:
            self._ready.observe(cache.ready_seconds.popleft())

    def _news(self, kind: str, totals: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
        """Return by how much each of these totals has grown since the last time."""
        seen = self._seen.setdefault(kind, {})
        news = [(key, total - seen.get(key, 0)) for key, total in dict(totals).items()]
        # A counter refuses less than 0, which would end the scheduler over a figure.
        seen.update(totals)
        return [(key, grown) for key, grown in news if grown > 0]

"""Pinned prefixes: pages that stay in HBM until a time, within what their owner may hold."""

from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

from sglang_ext.types import PUBLIC, Owner, Tier

__all__ = ["PinAnswer", "Pins"]


class PinAnswer(NamedTuple):
    """How many leading tokens of the text are pinned now, of how many that are cached.

    ``pin`` names the pin, None when nothing could be pinned.
    """

    pin: int | None
    tokens: int
    cached: int


class _Pin(NamedTuple):
    owner: Owner
    node_id: int


class Pins:
    """The pins of one cache. A pin locks its path; only the owner's own pages count for it."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._pins: dict[int, _Pin] = {}
        self._expiry: list[tuple[int, int]] = []
        self._numbers = count(1)

    def add(self, key: Any, owner: Owner, expires_ms: int | None = None) -> PinAnswer:
        """Pin what is cached of ``key``, as far as quota, reserves of others and pages allow.

        ``expires_ms`` is a time on the cache's clock, None for ever. O(path + pins of the owner).
        """
        key = self._cache.tree_core.own(key)
        assert key.owner in (owner, PUBLIC), f"{owner!r} cannot pin what {key.owner!r} owns"
        cached, node_id = self._match(key)
        tokens = self._affordable(node_id, owner)
        if tokens < cached:
            # Matching a shorter text splits the path where the pin must end.
            _, node_id = self._match(key[:tokens])
        if tokens == 0:
            return PinAnswer(None, 0, cached)
        self._cache.tree_core.pin(node_id)
        pin = next(self._numbers)
        self._pins[pin] = _Pin(owner, node_id)
        if expires_ms is not None:
            heappush(self._expiry, (expires_ms, pin))
        return PinAnswer(pin, tokens, cached)

    def remove(self, pin: int) -> bool:
        """Undo a pin; False when there is none of this number (expired, flushed). O(path)."""
        held = self._pins.pop(pin, None)
        if held is not None:
            self._cache.tree_core.unpin(held.node_id)
        return held is not None

    def remove_all(self, owner: Owner | None = None) -> int:
        """Undo all pins of an owner, of everybody for None; return how many there were."""
        pins = [pin for pin, held in self._pins.items() if owner in (None, held.owner)]
        for pin in pins:
            self.remove(pin)
        return len(pins)

    def remove_at(self, nodes: Iterable[Any]) -> None:
        """Undo the pins that end at one of ``nodes``. O(pins + nodes)."""
        ids = {node.id for node in nodes if node.pins}
        for pin in [pin for pin, held in self._pins.items() if held.node_id in ids]:
            self.remove(pin)

    def expire(self, now_ms: int) -> None:
        """Undo the pins whose time has come. O(1) when there is none."""
        while self._expiry and self._expiry[0][0] <= now_ms:
            self.remove(heappop(self._expiry)[1])

    def forget(self) -> None:
        """Drop all pins together with the tree that they were in."""
        self._pins.clear()
        self._expiry.clear()

    def tokens(self, owner: Owner) -> int:
        """Return how many of its own tokens an owner has pinned. O(paths of its pins)."""
        return sum(len(node.key) for node in self._pinned(owner) if node.owner == owner)

    def _match(self, key: Any) -> tuple[int, int]:
        found = self._cache.match_prefix(MatchPrefixParams(key=key))
        return int(found.device_prefix_len), int(found.last_device_node)

    def _path(self, node_id: int) -> list[Any]:
        """Return the nodes from below the root to this one."""
        core, path = self._cache.tree_core, []
        node = core.node_by_id(node_id)
        while node is not core.root_node:
            path.append(node)
            node = node.parent
        return path[::-1]

    def _pinned(self, owner: Owner) -> set[Any]:
        held = (pin.node_id for pin in self._pins.values() if pin.owner == owner)
        return {node for node_id in held for node in self._path(node_id)}

    def _affordable(self, node_id: int, owner: Owner) -> int:
        """Return how far from the root the path can be pinned, in whole pages."""
        room = self._cache.headroom(owner)
        quota = self._cache.limits(owner, Tier.HBM).quota
        if quota is not None:
            room = min(room, quota - self.tokens(owner))
        pinned, page = self._pinned(owner), self._cache.page_size
        tokens = 0
        for node in self._path(node_id):
            size = len(node.key)
            free = node.owner == PUBLIC or node in pinned
            taken = size if free else max(0, min(size, room // page * page))
            tokens += taken
            if taken < size:
                break
            room -= 0 if free else taken
        return tokens

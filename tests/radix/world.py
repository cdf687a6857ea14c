"""A cache and the naive model of it, put through the same operations and compared after each.

Every slot is followed from its allocation to its release, so one that is freed twice, handed out
twice or forgotten fails the test at that step.
"""

import sys
from array import array
from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_ext.namespace import parse
from sglang_ext.radix.integrity import check_integrity
from sglang_ext.types import PUBLIC, Tier
from tests.radix.caches import Rig, namespace
from tests.radix.model import Model, Page, Path, leading
from tests.radix.texts import Text, Texts

__all__ = ["World", "path_text"]

NO_SLOTS = torch.empty(0, dtype=torch.int64)


class World(Model):
    """Operations of several owners on one rig, each checked against the dictionary."""

    def __init__(self, rig: Rig, public: Sequence[Text] = ()) -> None:
        super().__init__(rig.page_size, public)
        self.rig, self.core = rig, rig.core
        self.slots: dict[int, Path | None] = {}
        self.host_slots: dict[int, Path] = {}
        self.next_host_slot = 0
        self.victims: list[Text] = []
        self._listen()

    def _listen(self) -> None:
        allocator, core = self.rig.allocator, self.core
        free, evict_leaf = allocator.free_segment, core.evict_device_leaf
        evict_host_leaf = core._evict_host_leaf

        def freed(slots: torch.Tensor, **kwargs: Any) -> None:
            self._device_freed(slots.tolist())
            free(slots, **kwargs)

        def evicted(node_id: int, *args: Any) -> Any:
            self._check_victim(core.node_by_id(node_id), self.device_leaves())
            return evict_leaf(node_id, *args)

        def evicted_host(node: Any, *args: Any, **kwargs: Any) -> None:
            self._check_victim(node, self.host_leaves())
            # The next victim may be its parent, so the model must hear of it at once.
            for slot in node.component_data[ComponentType.FULL].host_value.tolist():
                self._forget_host(slot)
            evict_host_leaf(node, *args, **kwargs)

        allocator.free_segment = freed
        core.evict_device_leaf = evicted
        core._evict_host_leaf = evicted_host
        full = self.rig.cache.components[ComponentType.FULL]
        full._full_kv_pool_host = object()
        self.rig.cache.host_pool_group = SimpleNamespace(
            free=lambda slots, pool: self._host_freed(slots.tolist())
        )
        core.set_hicache_enabled()
        core.write_through_threshold = sys.maxsize

    def _device_freed(self, slots: list[int]) -> None:
        for slot in slots:
            path = self.slots.pop(slot)  # KeyError: freed twice
            page = self.pages.get(path) if path is not None else None
            if page is not None and page.device is not None:
                assert not self.locked(path), f"{path} was freed under a lock"
                page.device = None
                self._forget_if_gone(path)

    def _host_freed(self, slots: list[int]) -> None:
        for slot in slots:
            del self.host_slots[slot]  # KeyError: freed twice

    def _forget_host(self, slot: int) -> None:
        path = self.host_slots[slot]
        page = self.pages.get(path)
        if page is not None and page.host is not None:
            page.host = None
            self._forget_if_gone(path)

    def _check_victim(self, node: Any, leaves: dict[Path, Page]) -> None:
        key, text = node.key, path_text(self.core, node)
        owner = parse(key.extra_key).owner if key.extra_key else None
        path = ("" if owner is None else f"{owner}|{key.cache_salt or ''}", text)
        assert path in leaves, f"{path} is no leaf of the model"
        oldest = min(page.used for page in leaves.values())
        assert leaves[path].used == oldest, "a younger leaf went first"
        self.victims.append(text)

    # ---- operations

    def begin(self) -> None:
        self.step += 1

    def match(self, text: Text, space: str) -> Any:
        device, host = self.expected(text, space)
        result = self.rig.cache.match_prefix(MatchPrefixParams(key=key_of(text, space)))
        size = self.page_size
        said = (result.device_prefix_len, result.host_hit_length)
        assert said == (device * size, host * size), f"{said} for {device}, {host} pages of {text}"
        paths = self.paths(text, space)
        self._touch(paths[: device + host])
        indices = self.core.collect_full_device_indices(
            result.last_device_node, self.core.root_node.id
        )
        modelled = [slot for path in paths[:device] for slot in self.pages[path].device]
        assert indices.tolist() == modelled, "the match returned other slots than were inserted"
        return result

    def insert(self, text: Text, space: str) -> Any:
        paths = self.paths(text, space)
        text = text[: len(paths) * self.page_size]
        found = self.match(text, space)
        held = found.device_prefix_len // self.page_size
        lock = self._lock(found.last_device_node, paths[:held])
        fresh = self.alloc(len(text) - found.device_prefix_len)
        cached = self.core.collect_full_device_indices(
            found.last_device_node, self.core.root_node.id
        )
        value = torch.cat((cached, fresh))
        result = self.rig.cache.insert(
            InsertParams(
                key=key_of(text, space),
                value=value,
                prev_prefix_len=found.device_prefix_len,
                inserted_len=found.device_prefix_len,
            )
        )
        self._adopt(paths, value.tolist(), held)
        self._unlock(lock)
        return result

    def insert_blind(self, text: Text, space: str) -> None:
        """Insert what was computed without a match, as when another request was faster."""
        paths = self.paths(text, space)
        text = text[: len(paths) * self.page_size]
        value = self.alloc(len(text))
        self.rig.cache.insert(InsertParams(key=key_of(text, space), value=value))
        self._adopt(paths, value.tolist(), 0)

    def _adopt(self, paths: list[Path], value: list[int], held: int) -> None:
        size = self.page_size
        for index, path in enumerate(paths):
            slots = tuple(value[index * size : (index + 1) * size])
            page = self.pages.setdefault(path, Page(None, None, self.step))
            page.used = self.step
            if page.device is None:
                page.device = slots
                self.slots.update(dict.fromkeys(slots, path))
            elif index >= held:
                assert not any(slot in self.slots for slot in slots), "a duplicate was not freed"

    def alloc(self, tokens: int) -> torch.Tensor:
        slots = self.rig.alloc(tokens)
        for slot in slots.tolist():
            assert slot not in self.slots, f"slot {slot} was handed out twice"
            self.slots[slot] = None
        return slots

    def room(self) -> int:
        """Return the tokens that an allocation can get, by the cache's own promise."""
        return int(self.rig.allocator.available_size() + self.rig.cache.evictable_size())

    def hold(self, text: Text, space: str) -> None:
        found = self.match(text, space)
        held = found.device_prefix_len // self.page_size
        self._lock(found.last_device_node, self.paths(text, space)[:held])

    def _lock(self, node_id: int, paths: list[Path]) -> Any:
        entry = (self.rig.cache.lock(node_id), paths)
        self.locks.append(entry)
        return entry

    def _unlock(self, entry: Any) -> None:
        self.locks.remove(entry)
        self.rig.cache.unlock(entry[0])

    def release(self, index: int) -> None:
        if self.locks:
            self._unlock(self.locks[index % len(self.locks)])

    def abort(self, text: Text, space: str) -> None:
        """A request that is cancelled after its slots were allocated: nothing of it stays."""
        found = self.match(text, space)
        held = found.device_prefix_len // self.page_size
        lock = self._lock(found.last_device_node, self.paths(text, space)[:held])
        whole = len(text) // self.page_size * self.page_size
        slots = self.alloc(whole - found.device_prefix_len)
        if len(slots):
            self.rig.allocator.free_segment(slots, start_pos=0)
        self._unlock(lock)

    def evict(self, tokens: int) -> None:
        before = self.rig.cache.evictable_size()
        freed = self.rig.evict(tokens)
        assert freed >= min(tokens, before), f"evicted {freed} of {tokens}, {before} were promised"

    def back_up(self, text: Text, space: str) -> None:
        """Copy a matched path to the host, ancestors first, as write-through does."""
        node = self.core.node_by_id(self.match(text, space).last_device_node)
        chain = []
        while node is not self.core.root_node:
            chain.append(node)
            node = node.parent
        paths, start = self.paths(text, space), 0
        for node in reversed(chain):
            end = start + len(node.key) // self.page_size
            if not node.backuped:
                self.core.commit_backup(node.id, self._host_alloc(paths[start:end]), {})
            start = end

    def _host_alloc(self, paths: list[Path]) -> torch.Tensor:
        slots = list(range(self.next_host_slot, self.next_host_slot + len(paths) * self.page_size))
        self.next_host_slot += len(slots)
        for index, path in enumerate(paths):
            mine = tuple(slots[index * self.page_size : (index + 1) * self.page_size])
            self.pages.setdefault(path, Page(None, None, self.step)).host = mine
            self.host_slots.update(dict.fromkeys(mine, path))
        return torch.tensor(slots, dtype=torch.int64)

    def demote(self, text: Text, space: str) -> None:
        """Free the device copy of a matched leaf whose host copy exists."""
        node = self.core.node_by_id(self.match(text, space).last_device_node)
        if node in self.core.evictable_device_leaves and node.backuped:
            self.rig.cache._demote(node.id, {ComponentType.FULL: 0})

    def load_back(self, text: Text, space: str) -> None:
        found = self.match(text, space)
        if not found.host_hit_length or found.host_hit_length > self.room():
            return
        size = self.page_size
        start = found.device_prefix_len // size
        paths = self.paths(text, space)[: start + found.host_hit_length // size]
        lock = self._lock(found.best_match_node, paths)
        slots = self.alloc(found.host_hit_length)
        transfer, extra = self.core.build_load_back_spec(found.best_match_node)
        self.core.commit_load_back(found.best_match_node, slots, transfer, extra)
        self.core.finish_load_back(found.best_match_node)
        for index, path in enumerate(paths[start:]):
            mine = tuple(slots[index * size : (index + 1) * size].tolist())
            self.pages[path].device = mine
            self.slots.update(dict.fromkeys(mine, path))
        self._unlock(lock)

    def evict_host(self, tokens: int) -> None:
        before = len(self.host_slots)
        result = self.core.drive_host_eviction(ComponentType.FULL, tokens)
        self.rig.cache._apply_eviction_result(result)
        freed = before - len(self.host_slots)
        assert freed >= tokens or not self.core.evictable_host_leaves

    def prefetch(self, text: Text, space: str) -> None:
        """Insert pages that came from a lower tier below the deepest match."""
        found = self.match(text, space)
        anchor = found.best_match_node
        start = found.device_prefix_len + found.host_hit_length
        paths = self.paths(text, space)
        rest = text[start : len(paths) * self.page_size]
        if not self.core.is_root(anchor) and not self.core.is_backuped(anchor) or not rest:
            return
        index = start // self.page_size
        # One side of the public boundary, as the cache asks for.
        end = index + leading(path[0] == paths[index][0] for path in paths[index:])
        paths, rest = paths[:end], rest[: (end - index) * self.page_size]
        slots = self._host_alloc(paths[index:])
        hashes = [f"{number:064x}" for number in range(len(paths) - index)]
        result = self.core.insert_host(anchor, key_of(rest, space), slots, hashes)
        assert not result.host_insert_dropped and result.prefix_len == 0

    # ---- comparison of the whole

    def check(self) -> None:
        check_integrity(self.rig.cache)
        counted: dict[tuple[str, Tier], int] = {}
        for (space, _), page in self.pages.items():
            owner = space.split("|")[0] if space else PUBLIC
            for tier, slots in ((Tier.HBM, page.device), (Tier.CPU, page.host)):
                if slots is not None:
                    key = (owner, tier)
                    counted[key] = counted.get(key, 0) + self.page_size
        said = {(owner, tier): usage.tokens for owner, tier, usage in self.core.ledger}
        assert said == counted
        assert self.rig.accounted() == self.rig.size
        assert set(self.slots) == {
            slot for page in self.pages.values() for slot in page.device or ()
        }

    def random_step(self, random: Random, texts: Texts) -> None:
        """Perform one operation drawn from all of them."""
        self.begin()
        text, space = texts.draw(random), texts.draw_space(random)
        pages = len(text) // self.page_size
        kind = random.choices(list(WEIGHTS), WEIGHTS.values())[0]
        if kind in ("insert", "insert_blind", "abort") and pages * self.page_size > self.room():
            kind = "evict"
        if kind == "hold" and len(self.locks) > 4:
            kind = "release"
        if kind in ("evict", "evict_host"):
            getattr(self, kind)(random.randint(1, 8) * self.page_size)
        elif kind == "release":
            self.release(random.randrange(1 << 16))
        else:
            getattr(self, kind)(text, space)


WEIGHTS = {
    "match": 20,
    "insert": 20,
    "insert_blind": 6,
    "hold": 8,
    "release": 10,
    "evict": 6,
    "abort": 5,
    "back_up": 8,
    "demote": 5,
    "load_back": 8,
    "evict_host": 3,
    "prefetch": 3,
}


def key_of(text: Text, space: str) -> RadixKey:
    owner, _, salt = space.partition("|")
    return RadixKey(array("q", text), namespace(owner), cache_salt=salt or None)


def path_text(core: Any, node: Any) -> Text:
    """Return the tokens from the root to the end of ``node``."""
    text: Text = ()
    while node is not core.root_node:
        text = tuple(node.key.token_ids) + text
        node = node.parent
    return text

"""A cache and a naive model of it that is told nothing about trees: a dictionary of pages.

Each page of text is one entry under (namespace, text so far). The world performs an operation on
both, follows every slot from its allocation to its release, and compares what each says.
"""

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
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

__all__ = ["Text", "Texts", "World", "path_text"]

Text = tuple[int, ...]
Path = tuple[str, Text]
NO_SLOTS = torch.empty(0, dtype=torch.int64)


@dataclass
class Page:
    """One page: the slots of its copies by tier, and the step of its last use."""

    device: Text | None
    host: Text | None
    used: int


class World:
    """Operations of several owners on one rig, each checked against the dictionary."""

    def __init__(self, rig: Rig, public: Sequence[Text] = ()) -> None:
        self.rig, self.core, self.page_size = rig, rig.core, rig.page_size
        self.public = public
        self.step = 0
        self.pages: dict[Path, Page] = {}
        self.slots: dict[int, Path | None] = {}
        self.host_slots: dict[int, Path | None] = {}
        self.locks: list[tuple[Any, list[Path]]] = []
        self.next_host_slot = 0
        self.victims: list[Text] = []
        self._listen()

    def _listen(self) -> None:
        allocator, core = self.rig.allocator, self.core
        free, evict_leaf = allocator.free_segment, core.evict_device_leaf

        def freed(slots: torch.Tensor, **kwargs: Any) -> None:
            self._device_freed(slots.tolist())
            free(slots, **kwargs)

        def evicted(node_id: int, *args: Any) -> Any:
            self._check_victim(core.node_by_id(node_id))
            return evict_leaf(node_id, *args)

        allocator.free_segment = freed
        core.evict_device_leaf = evicted
        full = self.rig.cache.components[ComponentType.FULL]
        full._full_kv_pool_host = object()
        self.rig.cache.host_pool_group = SimpleNamespace(
            free=lambda slots, pool: self._host_freed(slots.tolist())
        )
        core.set_hicache_enabled()
        core.write_through_threshold = sys.maxsize

    # ---- the naive rules

    def paths(self, text: Text, space: str) -> list[Path]:
        """Return the entry of each whole page of ``text``."""
        size = self.page_size
        shared = max((_common(text, prefix) for prefix in self.public), default=0) // size * size
        ends = range(size, len(text) + 1, size)
        return [("" if end <= shared else space, text[:end]) for end in ends]

    def expected(self, text: Text, space: str) -> tuple[int, int]:
        """Return (device, host) hits in pages."""
        pages = [self.pages.get(path) for path in self.paths(text, space)]
        device = _leading(page is not None and page.device is not None for page in pages)
        host = _leading(page is not None and page.host is not None for page in pages[device:])
        return device, host

    def locked(self, path: Path) -> bool:
        return any(path in paths for _, paths in self.locks)

    def leaf_pages(self) -> dict[Path, Page]:
        """Return the pages that may leave the device: unlocked, nothing on the device below."""
        size = self.page_size
        on_device = [path for path, page in self.pages.items() if page.device is not None]
        covered = {(space, text[:-size]) for space, text in on_device}
        covered |= {("", text[:-size]) for _, text in on_device}
        return {
            path: page
            for path, page in self.pages.items()
            if page.device is not None and path not in covered and not self.locked(path)
        }

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
            path = self.host_slots.pop(slot)
            page = self.pages.get(path) if path is not None else None
            if page is not None and page.host is not None:
                page.host = None
                self._forget_if_gone(path)

    def _forget_if_gone(self, path: Path) -> None:
        page = self.pages[path]
        if page.device is None and page.host is None:
            del self.pages[path]

    def _check_victim(self, node: Any) -> None:
        key, text = node.key, path_text(self.core, node)
        owner = parse(key.extra_key).owner if key.extra_key else None
        path = ("" if owner is None else f"{owner}|{key.cache_salt or ''}", text)
        leaves = self.leaf_pages()
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
        result = self.core.drive_host_eviction(ComponentType.FULL, tokens)
        self.rig.cache._apply_eviction_result(result)

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
        end = index + _leading(path[0] == paths[index][0] for path in paths[index:])
        paths, rest = paths[:end], rest[: (end - index) * self.page_size]
        slots = self._host_alloc(paths[index:])
        hashes = [f"{number:064x}" for number in range(len(paths) - index)]
        result = self.core.insert_host(anchor, key_of(rest, space), slots, hashes)
        assert not result.host_insert_dropped and result.prefix_len == 0

    def _touch(self, paths: list[Path]) -> None:
        for path in paths:
            self.pages[path].used = self.step

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

    def random_step(self, random: Random, texts: "Texts") -> None:
        """Perform one operation drawn from all of them."""
        self.begin()
        text, space = texts.draw(random), texts.draw_space(random)
        pages = len(text) // self.page_size
        kind = random.choices(KINDS, WEIGHTS)[0]
        if kind in ("insert", "abort") and pages * self.page_size > self.room():
            kind = "evict"
        if kind == "hold" and len(self.locks) > 4:
            kind = "release"
        if kind in ("evict", "evict_host"):
            getattr(self, kind)(random.randint(1, 8) * self.page_size)
        elif kind == "release":
            self.release(random.randrange(1 << 16))
        else:
            getattr(self, kind)(text, space)


KINDS = [
    "match",
    "insert",
    "hold",
    "release",
    "evict",
    "abort",
    "back_up",
    "demote",
    "load_back",
    "evict_host",
    "prefetch",
]
WEIGHTS = (20, 24, 8, 10, 6, 5, 8, 5, 8, 3, 3)


class Texts:
    """Short texts over few pages, so that prefixes overlap at every depth."""

    def __init__(self, page_size: int, public: list[Text], spaces: list[str]) -> None:
        self.page_size, self.public, self.spaces = page_size, public, spaces

    def draw(self, random: Random) -> Text:
        text: Text = ()
        if self.public and random.random() < 0.6:
            text = random.choice(self.public)
            text = text[: random.randint(0, len(text))] if random.random() < 0.3 else text
        for _ in range(random.randint(0, 5)):
            page = [random.randint(1, 2)] * self.page_size
            if random.random() < 0.2:
                page[random.randrange(self.page_size)] = 9
            text += tuple(page)
        cut = random.randint(0, self.page_size - 1) if random.random() < 0.3 else 0
        return text[: len(text) - cut]

    def draw_space(self, random: Random) -> str:
        return random.choice(self.spaces)


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


def _common(left: Text, right: Text) -> int:
    return _leading(a == b for a, b in zip(left, right, strict=False))


def _leading(flags: Any) -> int:
    count = 0
    for flag in flags:
        if not flag:
            break
        count += 1
    return count

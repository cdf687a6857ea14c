"""KV events: what a router that listens to nothing else knows of each tenant's pages."""

from collections import defaultdict
from random import Random
from typing import Any

import msgspec
import pytest
import zmq
from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_ext.radix.integrity import walk
from tests.radix.caches import Rig, make_rig

PROMPT = [7] * 8
ADDRESS = "inproc://events-by-owner"
FORMATS = pytest.mark.parametrize("dynamo", [False, True])


def make_event_rig(pages: int = 64, dynamo: bool = False, **changes: Any) -> Rig:
    events = {"enable_kv_cache_events": True, "dynamo_kv_event_format": dynamo}
    rig = make_rig(4 * pages, 4, [PROMPT], **events, **changes)
    rig.cache.take_events()
    return rig


class Router:
    """Rebuilds who has which text from the events alone."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[str, int | None, tuple[int, ...]]] = {}

    def hear(self, events: list[Any]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
            elif isinstance(event, BlockRemoved):
                for block in event.block_hashes:
                    del self.blocks[block]
            else:
                self._store(event)

    def _store(self, event: BlockStored) -> None:
        parent, owner = event.parent_block_hash, event.cache_salt or ""
        assert parent is None or parent in self.blocks, "the parent was never stored"
        for index, block in enumerate(event.block_hashes):
            assert block not in self.blocks, "one block was stored twice"
            page = event.token_ids[index * event.block_size : (index + 1) * event.block_size]
            self.blocks[block] = owner, parent, tuple(page)
            parent = block

    def texts(self) -> dict[str, set[tuple[int, ...]]]:
        """Return by owner the text of each page with everything before it."""
        found: dict[str, set[tuple[int, ...]]] = defaultdict(set)
        for block, (owner, _, _) in self.blocks.items():
            found[owner].add(self._text(block))
        return found

    def _text(self, block: int | None) -> tuple[int, ...]:
        if block is None:
            return ()
        _, parent, page = self.blocks[block]
        return self._text(parent) + page


def texts_in(rig: Rig) -> dict[str, set[tuple[int, ...]]]:
    """Return by owner the text of each page in the tree with everything before it."""
    found: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    before: dict[int, tuple[int, ...]] = {rig.core.root_node.id: ()}
    for node in walk(rig.core):
        text = before[node.parent.id]
        for start in range(0, len(node.key), rig.page_size):
            text += tuple(node.key.token_ids[start : start + rig.page_size])
            found[node.owner].add(text)
        before[node.id] = text
    return found


@FORMATS
@pytest.mark.trial(9)
def test_equal_text_of_two_tenants_is_not_one_block(dynamo: bool) -> None:
    rig = make_event_rig(dynamo=dynamo)
    stored = {}
    for owner in ("t:a", "t:b"):
        rig.insert([1] * 8, owner)
        rig.insert(PROMPT + [1] * 8, owner)
        stored[owner] = rig.cache.take_events()
    named = {
        owner: {block for event in events if event.cache_salt for block in event.block_hashes}
        for owner, events in stored.items()
    }
    assert {event.cache_salt for event in stored["t:a"]} == {"t:a", None}
    assert {event.cache_salt for event in stored["t:b"]} == {"t:b"}, "the prompt is stored once"
    assert len(named["t:a"]) == len(named["t:b"]) == 4
    assert not named["t:a"] & named["t:b"]


@FORMATS
@pytest.mark.trial(9)
@pytest.mark.trial(10)
def test_the_stream_alone_tells_who_has_what_at_any_time(dynamo: bool) -> None:
    """What is removed was stored, and nothing that was not removed is gone."""
    rig, router, random = make_event_rig(24, dynamo), Router(), Random(9)
    for _ in range(300):
        text = PROMPT * (random.random() < 0.6) + random.choices([1, 2], k=random.randint(0, 12))
        rig.insert(text, random.choice(["t:a", "t:b", "g:c"]))
        if random.random() < 0.1:
            rig.cache.evict(EvictParams(num_tokens=random.randint(1, 64)))
        if random.random() < 0.01:
            rig.cache.reset()
            rig.allocator.clear()
        router.hear(rig.cache.take_events())
        assert router.texts() == texts_in(rig)


def test_sealed_owners_do_not_appear() -> None:
    rig = make_event_rig()
    rig.insert(PROMPT + [1] * 8, "s:bank")
    rig.match(PROMPT, "s:bank")
    rig.evict(10**6)
    assert not list(walk(rig.core))
    assert rig.cache.take_events() == []


def hear(publisher: ZmqEventPublisher, batch: KVEventBatch) -> bytes:
    """Return what a listener receives of a batch; until it is subscribed, nobody receives it."""
    with zmq.Context.instance().socket(zmq.SUB) as listener:
        listener.subscribe(b"")
        listener.connect(ADDRESS)
        publisher.publish(batch)
        while not listener.poll(100):
            publisher.publish(batch)
        return bytes(listener.recv_multipart()[-1])


@pytest.mark.trial(10)
def test_a_listener_reads_the_owner_off_the_wire() -> None:
    """Through SGLang's own publisher."""
    rig = make_event_rig()
    rig.insert(PROMPT + [1] * 4, "t:a")
    publisher = ZmqEventPublisher(0, ADDRESS)
    try:
        heard = hear(publisher, KVEventBatch(ts=0.0, events=rig.cache.take_events()))
    finally:
        publisher.shutdown()
    events = msgspec.msgpack.decode(heard, type=KVEventBatch).events
    assert [(event.cache_salt, event.token_ids) for event in events] == [
        (None, PROMPT),
        ("t:a", [1] * 4),
    ]

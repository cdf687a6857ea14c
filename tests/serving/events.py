"""What a router that hears nothing but the KV events of one server knows of who has which pages."""

from collections import defaultdict
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

import msgspec
import zmq
from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    StorageMedium,
)

__all__ = ["Index"]

_HBM = StorageMedium.GPU.value
_POLL_MS = 200


class _Block(NamedTuple):
    owner: str
    parent: int | None
    page: tuple[int, ...]


class Index:
    """Pages by the hashes of one server's stream, and the memory that each lies in."""

    def __init__(self, address: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.connect(address)
        self._blocks: dict[int, _Block] = {}
        self._places: dict[int, set[str]] = defaultdict(set)

    def begin(self, provoke: Callable[[int], object]) -> None:
        """Return once the stream is heard; what came before is lost.

        ``provoke`` is called with 0, 1, 2, ... and has something new stored each time.
        """
        attempts = count()
        while not self._socket.poll(_POLL_MS):
            provoke(next(attempts))

    def hear(self) -> None:
        """Take in what has come."""
        while self._socket.poll(0):
            batch = msgspec.msgpack.decode(self._socket.recv_multipart()[-1], type=KVEventBatch)
            for event in batch.events:
                self._take(event)

    def blocks(self, owner: str) -> set[int]:
        """Return the hashes of an owner's pages in HBM."""
        self.hear()
        return {
            block
            for block, places in self._places.items()
            if _HBM in places and self._blocks[block].owner == owner
        }

    def owners(self) -> set[str]:
        """Return who is named."""
        return {block.owner for block in self._blocks.values()}

    def texts(self, owner: str) -> set[tuple[int, ...]]:
        """Return the text of each of these pages with everything before it."""
        return {self._text(block) for block in self.blocks(owner)}

    def close(self) -> None:
        self._socket.close(0)

    def _text(self, block: int | None) -> tuple[int, ...]:
        if block not in self._blocks:
            return ()
        _, parent, page = self._blocks[block]
        return self._text(parent) + page

    def _take(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        if isinstance(event, AllBlocksCleared):
            self._places.clear()
        elif isinstance(event, BlockRemoved):
            for block in event.block_hashes:
                self._places[block].discard(event.medium or _HBM)
        else:
            self._store(event)

    def _store(self, event: BlockStored) -> None:
        parent, size = event.parent_block_hash, event.block_size
        for index, block in enumerate(event.block_hashes):
            page = tuple(event.token_ids[index * size : (index + 1) * size])
            entry = _Block(event.cache_salt or "", parent, page)
            assert self._blocks.setdefault(block, entry) == entry, "one hash for two pages"
            self._places[block].add(event.medium or _HBM)
            parent = block

"""Batches of pages between the caller's memory and the shared store."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from sglang_ext.tiering.codec import Opener, PageCodec
from sglang_ext.tiering.counters import Counters
from sglang_ext.tiering.page_format import HEADER_BYTES, Reject, read_written_ms
from sglang_ext.tiering.remote_link import Link
from sglang_ext.tiering.remote_names import HeldPage
from sglang_ext.tiering.remote_objects import Objects, Reply
from sglang_ext.tiering.transfers import Deliver, Fill
from sglang_ext.tiering.workers import Batch
from sglang_ext.types import Owner

__all__ = ["Piece", "Read", "RemoteTransfers"]

T = TypeVar("T")

_TOGETHER_BYTES = 16 * 2**20
"""Pages are moved several at a time, up to this size: each call asks the master, twice to write."""


class Piece(NamedTuple):
    """One page of a batch: its place there, its owner, filed key, object name and body bytes."""

    place: int
    owner: Owner
    key: bytes
    name: str
    size: int


class Read(NamedTuple):
    """What became of a batch that was read."""

    good: list[Piece]
    bad: list[HeldPage]
    """To be removed: damaged, or over."""


class RemoteTransfers:
    """Moves pages on the workers, by way of buffers of its own; see ``workers``.

    A page is copied and checked, or sealed, in one go: so its bytes are still in the core's cache.
    """

    def __init__(
        self,
        objects: Objects,
        codec: PageCodec,
        link: Link,
        counters: Counters,
        slot_bytes: int,
    ) -> None:
        self._objects = objects
        self._codec = codec
        self._link = link
        self._counters = counters
        self._slot_bytes = slot_bytes
        self._most = max(1, _TOGETHER_BYTES // slot_bytes)
        self._free: list[list[memoryview]] = []
        """Slots of registered memory that no thread uses; the warmest come last."""
        self._wire = threading.Lock()
        """One transfer at a time: two at once take longer than one after the other."""

    def put(
        self,
        pieces: Sequence[Piece],
        fill: Fill,
        timeout_s: float,
        now_ms: int,
        enter: Callable[[list[Piece]], list[Piece]],
    ) -> list[int]:
        """Write pages; returns the places of those that are stored now.

        ``enter`` is given what was stored, also after the deadline, and returns what may stay.
        """
        stored: list[int] = []

        def work(batch: Batch, places: range) -> None:
            some = self._put_some(batch, pieces[places.start : places.stop], fill, now_ms)
            stored.extend(piece.place for piece in enter(some))

        self._share(work, len(pieces), timeout_s)
        return list(stored)

    def get(
        self,
        pieces: Sequence[Piece],
        deliver: Deliver,
        timeout_s: float,
        now: float,
        lifetime_s: Callable[[Owner], float],
    ) -> Read:
        """Read pages and hand them over; a page older than its owner's lifetime is bad."""
        read = Read([], [])

        def work(batch: Batch, places: range) -> None:
            some = pieces[places.start : places.stop]
            self._get_some(batch, some, deliver, read, lambda owner: now - lifetime_s(owner))

        self._share(work, len(pieces), timeout_s)
        # A thread that is late may still add to the lists.
        return Read(sorted(read.good), list(read.bad))

    def _share(self, work: Callable[[Batch, range], None], count: int, timeout_s: float) -> None:
        """Move ``count`` pages, about as many in each call."""
        calls = -(-count // self._most)
        self._link.share(work, count, -(-count // max(1, calls)), timeout_s)

    def _put_some(
        self, batch: Batch, pieces: Sequence[Piece], fill: Fill, now_ms: int
    ) -> list[Piece]:
        # A key may have to be asked for, which the caller's memory must not wait for.
        sealers = {owner: self._codec.sealer(owner) for owner in _owners(pieces)}
        writable = [(piece, seal) for piece in pieces if (seal := sealers[piece.owner])]
        if len(writable) < len(pieces):
            self._counters.add(Reject.NO_KEY, len(pieces) - len(writable))
        with self._slots() as slots:
            pages = [
                slot[: HEADER_BYTES + piece.size]
                for (piece, _), slot in zip(writable, slots, strict=False)
            ]

            def fill_all() -> None:
                for (piece, seal), page in zip(writable, pages, strict=True):
                    fill(piece.place, page[HEADER_BYTES:])
                    seal(page, piece.key, piece.size, now_ms)

            if not writable or not self._link.is_open or not batch.guarded(fill_all):
                return []
            written = [piece for piece, _ in writable]
            return self._stored(written, self._move(self._objects.put, written, pages))

    def _stored(self, pieces: list[Piece], replies: list[Reply]) -> list[Piece]:
        """Return what is in the store now, and count."""
        pairs = list(zip(pieces, replies, strict=False))
        stored = [piece for piece, reply in pairs if reply is Reply.DONE]
        for _, reply in pairs:
            if reply is not Reply.DONE:
                self._note(reply)
        if stored:
            self._counters.add("stored", len(stored))
            self._counters.add("stored_bytes", sum(piece.size for piece in stored))
        return stored

    def _get_some(
        self,
        batch: Batch,
        pieces: Sequence[Piece],
        deliver: Deliver,
        read: Read,
        oldest: Callable[[Owner], float],
    ) -> None:
        if not self._link.is_open:
            self._counters.add("miss", len(pieces))
            return
        openers = {owner: self._codec.opener(owner) for owner in _owners(pieces)}
        handed: list[int] = []
        with self._slots() as slots:
            replies = self._move(self._objects.get, pieces, slots[: len(pieces)])

            def hand_over() -> None:
                for piece, slot, reply in zip(pieces, slots, replies, strict=False):
                    body = self._checked(piece, slot, reply, openers[piece.owner], oldest)
                    if isinstance(body, memoryview):
                        deliver(piece.place, body)
                        read.good.append(piece)
                        handed.append(len(body))
                    elif body is not None:
                        read.bad.append(HeldPage(piece.name, piece.owner, self._slot_bytes))

            try:
                batch.guarded(hand_over)
            finally:
                self._wipe(pieces, slots)
        if handed:
            self._counters.add("hit", len(handed))
            self._counters.add("hit_bytes", sum(handed))

    def _checked(
        self,
        piece: Piece,
        slot: memoryview,
        reply: int | Reply,
        opener: Opener,
        oldest: Callable[[Owner], float],
    ) -> memoryview | str | None:
        """Return the body; what is wrong with the page; or None where there is none."""
        if isinstance(reply, Reply):
            self._note(reply)
            return None
        body = opener(slot[:reply], piece.key)
        if isinstance(body, Reject):
            self._counters.add(body)
            return body
        if read_written_ms(slot) / 1000 < oldest(piece.owner):
            self._counters.add("expired")
            return "expired"
        return body

    def _note(self, reply: Reply) -> None:
        self._counters.add("miss" if reply is Reply.ABSENT else reply)
        if reply is Reply.LOST:
            # To ask its machine once more would cost another second.
            self._link.breaker.failed("a machine that holds pages is gone")

    def _move(
        self,
        call: Callable[[list[str], list[memoryview]], list[T]],
        pieces: Sequence[Piece],
        pages: list[memoryview],
    ) -> list[T]:
        """Put or get pages, after others are done; no replies where nobody answers."""
        names = [piece.name for piece in pieces]
        with self._wire:
            return self._link.try_now(lambda: call(names, pages)) or []

    @contextmanager
    def _slots(self) -> Iterator[list[memoryview]]:
        """Lend slots for as many pages as are moved together, with whatever they held."""
        try:
            slots = self._free.pop()
        except IndexError:
            size = self._slot_bytes
            buffer = self._objects.buffer(self._most * size)
            slots = [buffer[at : at + size] for at in range(0, len(buffer), size)]
        try:
            yield slots
        finally:
            self._free.append(slots)

    def _wipe(self, pieces: Sequence[Piece], slots: Sequence[memoryview]) -> None:
        """Leave nothing in our memory that lies encrypted in the store."""
        for piece, slot in zip(pieces, slots, strict=False):
            if self._codec.encrypts(piece.owner):
                slot[:] = bytes(len(slot))


def _owners(pieces: Iterable[Piece]) -> set[Owner]:
    return {piece.owner for piece in pieces}

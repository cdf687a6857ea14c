"""Batches of pages between the caller's memory and the shared store."""

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sglang_ext.tiering.codec import PageCodec
from sglang_ext.tiering.counters import Counters
from sglang_ext.tiering.page_format import HEADER_BYTES, Reject, read_written_ms
from sglang_ext.tiering.remote_link import Link
from sglang_ext.tiering.remote_names import HeldPage
from sglang_ext.tiering.remote_objects import Objects, Reply
from sglang_ext.tiering.transfers import Deliver, Fill
from sglang_ext.tiering.workers import Batch
from sglang_ext.types import Owner

__all__ = ["Piece", "Read", "RemoteTransfers"]

_TOGETHER_BYTES = 4 * 2**20
"""Pages are moved several at a time, up to this size."""


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
    """Moves pages on the workers. A thread works in a buffer of its own; see ``workers``."""

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
        self._together = max(1, _TOGETHER_BYTES // slot_bytes)
        self._local = threading.local()
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
            some = self._put_some(batch, [pieces[place] for place in places], fill, now_ms)
            stored.extend(piece.place for piece in enter(some))

        self._link.share(work, len(pieces), self._together, timeout_s)
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
            some = [pieces[place] for place in places]
            self._get_some(batch, some, deliver, read, lambda owner: now - lifetime_s(owner))

        self._link.share(work, len(pieces), self._together, timeout_s)
        # A thread that is late may still add to the lists.
        return Read(sorted(read.good), list(read.bad))

    def _put_some(self, batch: Batch, pieces: list[Piece], fill: Fill, now_ms: int) -> list[Piece]:
        views = self._views(len(pieces))

        def fill_all() -> None:
            for piece, view in zip(pieces, views, strict=False):
                fill(piece.place, view[HEADER_BYTES : HEADER_BYTES + piece.size])

        if not self._link.is_open or not batch.guarded(fill_all):
            return []
        for piece, view in zip(pieces, views, strict=False):
            if not self._codec.seal(view, piece.owner, piece.key, piece.size, now_ms):
                self._wipe(pieces, views)
                self._counters.add(Reject.NO_KEY, len(pieces))
                return []
        values = [
            view[: HEADER_BYTES + piece.size] for piece, view in zip(pieces, views, strict=False)
        ]
        names = [piece.name for piece in pieces]
        with self._wire:
            replies = self._link.try_now(lambda: self._objects.put(names, values))
        return [
            piece
            for piece, reply in zip(pieces, replies or (), strict=False)
            if self._is_stored(piece, reply)
        ]

    def _is_stored(self, piece: Piece, reply: Reply) -> bool:
        if reply is Reply.DONE:
            self._counters.add("stored")
            self._counters.add("stored_bytes", piece.size)
            return True
        self._note(reply)
        return False

    def _get_some(
        self,
        batch: Batch,
        pieces: list[Piece],
        deliver: Deliver,
        read: Read,
        oldest: Callable[[Owner], float],
    ) -> None:
        if not self._link.is_open:
            self._counters.add("miss", len(pieces))
            return
        views = self._views(len(pieces))
        names = [piece.name for piece in pieces]
        with self._wire:
            replies = self._link.try_now(lambda: self._objects.get(names, views))
        bodies: list[tuple[Piece, memoryview]] = []
        for piece, view, reply in zip(pieces, views, replies or (), strict=False):
            body = self._checked(piece, view, reply, oldest)
            if isinstance(body, memoryview):
                bodies.append((piece, body))
            elif body is not None:
                read.bad.append(HeldPage(piece.name, piece.owner, self._slot_bytes))
        try:
            self._hand_over(batch, bodies, deliver, read)
        finally:
            self._wipe(pieces, views)

    def _checked(
        self, piece: Piece, view: memoryview, reply: int | Reply, oldest: Callable[[Owner], float]
    ) -> memoryview | str | None:
        """Return the body; what is wrong with the page; or None where there is none."""
        if isinstance(reply, Reply):
            self._note(reply)
            return None
        body = self._codec.open(view[:reply], piece.owner, piece.key)
        if isinstance(body, Reject):
            self._counters.add(body)
            return body
        if read_written_ms(view) / 1000 < oldest(piece.owner):
            self._counters.add("expired")
            return "expired"
        return body

    def _hand_over(
        self, batch: Batch, bodies: list[tuple[Piece, memoryview]], deliver: Deliver, read: Read
    ) -> None:
        def hand_over() -> None:
            for piece, body in bodies:
                deliver(piece.place, body)
                read.good.append(piece)

        if batch.guarded(hand_over):
            self._counters.add("hit", len(bodies))
            self._counters.add("hit_bytes", sum(len(body) for _, body in bodies))

    def _note(self, reply: Reply) -> None:
        self._counters.add("miss" if reply is Reply.ABSENT else reply)
        if reply is Reply.LOST:
            # To ask its machine once more would cost another second.
            self._link.breaker.failed("a machine that holds pages is gone")

    def _views(self, count: int) -> list[memoryview]:
        """Return slots of this thread's registered memory, with whatever they held."""
        size = count * self._slot_bytes
        buffer: memoryview | None = getattr(self._local, "buffer", None)
        if buffer is None or len(buffer) < size:
            size = self._together * self._slot_bytes
            buffer = self._local.buffer = self._objects.buffer(size)
        return [
            buffer[at : at + self._slot_bytes]
            for at in range(0, count * self._slot_bytes, self._slot_bytes)
        ]

    def _wipe(self, pieces: Sequence[Piece], views: Sequence[memoryview]) -> None:
        """Leave nothing in this thread's buffer that lies encrypted in the store."""
        for piece, view in zip(pieces, views, strict=False):
            if self._codec.encrypts(piece.owner):
                view[:] = bytes(len(view))

"""Pages in a store that several machines share: checked, owned, bounded, never waited for long.

    refs -> names -> exist? -> room? -> threads: fill, seal, put
    refs -> names -> threads: get, check, open -> deliver

The same contract as the NVMe store. Everything that goes wrong is a miss and a counter: a store or
a peer that does not answer, a slow link, a full store, a damaged page. After a failure nobody asks
for a while, and the store is used again as soon as it answers.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from sglang_ext.tiering.caps import Caps
from sglang_ext.tiering.codec import PageCodec
from sglang_ext.tiering.counters import Counters
from sglang_ext.tiering.nvme_store import Usage
from sglang_ext.tiering.page_format import Fingerprint, Reject
from sglang_ext.tiering.page_store import PageStore
from sglang_ext.tiering.remote_config import RemoteConfig
from sglang_ext.tiering.remote_deletions import Deletions
from sglang_ext.tiering.remote_holdings import Holdings
from sglang_ext.tiering.remote_keys import SharedKeys
from sglang_ext.tiering.remote_link import Link
from sglang_ext.tiering.remote_names import HeldPage, page_name, page_prefix
from sglang_ext.tiering.remote_notices import Notices
from sglang_ext.tiering.remote_objects import Objects, StoreSilent
from sglang_ext.tiering.remote_room import Room
from sglang_ext.tiering.remote_transfers import Piece, RemoteTransfers
from sglang_ext.tiering.remote_upkeep import Upkeep
from sglang_ext.tiering.transfers import Deliver, Fill, PageRef
from sglang_ext.types import Owner

__all__ = ["RemoteStore"]


class RemoteStore(PageStore):
    """One rank's view of the shared store. Thread-safe; no method raises because of the store."""

    def __init__(
        self,
        config: RemoteConfig,
        objects: Objects,
        master: bytes | None = None,
        clock: Callable[[], float] = time.time,
        background: bool = True,
    ) -> None:
        """Nothing is asked before ``start``. ``master`` wraps the owners' keys.

        ``background`` False: only ``refresh`` asks again (for tests).
        """
        self.config = config
        self._objects = objects
        self._clock = clock
        self._counters = Counters()
        self._lock = threading.Lock()
        self._holdings = Holdings()
        self._keys = None if master is None else SharedKeys(objects, master)
        self.notices = Notices(objects)
        """What other machines deleted."""
        self._codec = PageCodec(config.fingerprint, self._keys, config.encrypted)
        self._prefix = page_prefix(config.fingerprint, config.slot_bytes)
        self._link = Link(config.depth, config.timeout_s, self._counters)
        self._room = Room(
            config.caps,
            config.order,
            config.slot_bytes,
            objects,
            self._link,
            self._holdings,
            self._lock,
            self._counters,
        )
        self._transfers = RemoteTransfers(
            objects, self._codec, self._link, self._counters, config.slot_bytes
        )
        self._deletions = Deletions(
            objects,
            self._keys,
            self.notices,
            self._holdings,
            self._lock,
            self._counters,
            clock,
        )
        self._upkeep = Upkeep(
            objects,
            self._link,
            self._holdings,
            self._lock,
            self._deletions,
            self.notices,
            self._counters,
            clock,
            config.encrypted,
            config.copies,
        )
        self._started = False
        self._closed = False
        self._background = background

    @property
    def counters(self) -> Mapping[str, int]:
        """Counts since open: ``hit``, ``miss``, ``stored``, ``evicted``, each reason of loss."""
        return self._counters.snapshot()

    @property
    def answers(self) -> bool:
        """Whether pages are asked for: the store answered last time, and is as the policy wants."""
        return self._link.is_open and self._upkeep.settled

    def put_batch(
        self,
        refs: Sequence[PageRef],
        sizes: Sequence[int],
        fill: Fill,
        timeout_s: float | None = None,
    ) -> list[bool]:
        """Store pages of ``sizes`` bytes whose bodies ``fill`` writes; those that are there stay.

        True for each that is there now. Nothing of the caller's memory is used after return.
        """
        results = [False] * len(refs)
        pieces = [
            piece
            for piece in self._pieces(refs, sizes, writing=True)
            if self.config.copies(piece.owner)
        ]
        there = self._there(pieces)
        self._counters.add("already_there", sum(there))
        for piece, found in zip(pieces, there, strict=False):
            results[piece.place] = found
        missing = [piece for piece, found in zip(pieces, there, strict=False) if not found]
        begun = self._deletions.begun()
        stored = self._transfers.put(
            self._room.admit(missing),
            fill,
            self._timeout(timeout_s),
            int(self._clock() * 1000),
            lambda pieces: self._enter(pieces, begun),
        )
        for place in stored:
            results[place] = True
        return results

    def get_batch(
        self, refs: Sequence[PageRef], deliver: Deliver, timeout_s: float | None = None
    ) -> list[bool]:
        """Read pages and hand the body of each to ``deliver``; True for each that was handed over.

        Nothing of the caller's memory is touched after return.
        """
        results = [False] * len(refs)
        pieces = self._pieces(refs, [0] * len(refs), writing=False)
        self._counters.add("miss", len(refs) - len(pieces))
        read = self._transfers.get(
            pieces, deliver, self._timeout(timeout_s), self._clock(), self.config.lifetime_s
        )
        with self._lock:
            now = self._clock()
            for piece in reversed(read.good):
                results[piece.place] = True
                self._holdings.touch(piece.owner, piece.name, now)
        if read.bad:
            self._link.ask(lambda: self._room.remove(read.bad))
        return results

    def contains_batch(self, refs: Sequence[PageRef]) -> list[bool]:
        """Tell which pages are there, with one question to the store; a later read may miss."""
        results = [False] * len(refs)
        pieces = self._pieces(refs, [0] * len(refs), writing=False)
        for piece, found in zip(pieces, self._there(pieces), strict=False):
            results[piece.place] = found
        return results

    def owners(self) -> list[Owner]:
        """Return the owners that hold a page of any model, as far as is known here."""
        with self._lock:
            return list(self._holdings.used)

    def usage(self, owner: Owner) -> int:
        """Return the bytes of one owner on all machines."""
        with self._lock:
            return self._holdings.used.get(owner, 0)

    def total_usage(self) -> Usage:
        """Return the bytes of everybody on all machines."""
        with self._lock:
            return Usage(dict(self._holdings.used), 0)

    def delete(self, refs: Sequence[PageRef]) -> int:
        """Delete pages; returns the bytes that became free.

        Where the store does not answer, their owners lose all they have, once it does.
        """
        owners = self._begin_deletion(refs)
        removed = self._link.ask(lambda: self._remove(refs)) if owners else 0
        if removed is None:
            self._deletions.owe(owners)
        return (removed or 0) * self.config.slot_bytes

    def delete_soon(self, refs: Sequence[PageRef]) -> None:
        """Do the same without waiting for it."""
        owners = self._begin_deletion(refs)
        if owners:
            self._link.tell(lambda: self._remove(refs), lambda: self._deletions.owe(owners))

    def delete_owner(self, owner: Owner) -> int:
        """Delete every page of ``owner``, of all models and machines; returns the bytes freed.

        Its key goes first. Other machines are told, for what they have themselves. Where the store
        does not answer, all of it is done once it does, and nothing of the owner is read or
        written until then.
        """
        if self._closed:
            return 0
        self._deletions.begin([owner])
        held = self.usage(owner)
        if self._link.ask(lambda: self._deletions.delete(owner)) is None:
            self._deletions.owe([owner])
            return 0
        return held

    def expire(self, owner: Owner, before: float) -> int:
        """Delete what this machine wrote for ``owner`` and nobody used here since that time."""
        with self._lock:
            names = self._holdings.unused_since(owner, before)
        pages = [HeldPage(name, owner, self.config.slot_bytes) for name in names]
        removed = self._link.ask(lambda: self._room.remove(pages)) if pages else 0
        return (removed or 0) * self.config.slot_bytes

    def rebind(self, fingerprint: Fingerprint) -> None:
        """Go on with other weights; pages of the former stay for machines that still have them."""
        self._codec.fingerprint = fingerprint
        self._prefix = page_prefix(fingerprint, self.config.slot_bytes)

    def set_caps(self, caps: Caps) -> None:
        """Use other caps from now on; who is above them gives when there is something to write."""
        self._room.caps = caps

    def start(self, encryption_changed: bool = False) -> None:
        """Begin to use the store, once ``encrypted`` of the configuration tells the truth.

        ``encryption_changed``: use nothing until what lies there in the other form is deleted, at
        the next refresh.
        """
        if encryption_changed:
            self._upkeep.settled = False
        if self._started:
            return
        self._started = True
        self.refresh()
        if self._background:
            self._upkeep.start(self.config.refresh_s, self._end_old)

    def refresh(self) -> None:
        """Ask who holds what, do what is owed, and go on where the store was silent.

        Also called in the background, every ``refresh_s``. O(pages in the store).
        """
        self._upkeep.refresh()

    def check_integrity(self) -> None:
        """Assert every invariant of the books; for tests."""
        with self._lock:
            self._holdings.check_integrity()

    def close(self) -> None:
        """Let go of the store; later calls miss. The pages stay."""
        if self._closed:
            return
        self._closed = True
        self._upkeep.stop()
        if self._link.stop():
            self._objects.close()

    def _end_old(self) -> None:
        """Delete what this machine wrote and whose time is over."""
        now = self._clock()
        for owner in self.owners():
            self.expire(owner, now - self.config.lifetime_s(owner))

    def _begin_deletion(self, refs: Sequence[PageRef]) -> set[Owner]:
        """Return the owners of pages to delete; where that cannot be done now, it is owed."""
        owners = set() if self._closed else {ref.owner for ref in refs}
        self._deletions.begin(owners)
        if owners and not self.answers:
            self._deletions.owe(owners)
            return set()
        return owners

    def _remove(self, refs: Sequence[PageRef]) -> int:
        if not self.answers:
            raise StoreSilent("it stopped answering")
        pieces = self._pieces(refs, [0] * len(refs), writing=False)
        pages = [HeldPage(piece.name, piece.owner, self.config.slot_bytes) for piece in pieces]
        return self._room.remove(pages) if pages else 0

    def _pieces(self, refs: Sequence[PageRef], sizes: Sequence[int], writing: bool) -> list[Piece]:
        """Return what is to be moved: not pages of owners without a key, or that are owed."""
        if not self.answers:
            return []
        asked = [
            (place, ref) for place, ref in enumerate(refs) if not self._deletions.is_owed(ref.owner)
        ]
        keys = self._codec.names([ref for _, ref in asked], writing)
        if None in keys:
            self._counters.add(Reject.NO_KEY, keys.count(None))
        return [
            Piece(place, owner, key, page_name(self._prefix, owner, key), sizes[place])
            for (place, (owner, _)), key in zip(asked, keys, strict=True)
            if key is not None
        ]

    def _there(self, pieces: Sequence[Piece]) -> list[bool]:
        """Tell which are there; nothing where nobody answers."""
        names = [piece.name for piece in pieces]
        return (self._link.ask(lambda: self._objects.exist(names)) or []) if names else []

    def _enter(self, stored: Sequence[Piece], begun: Counter[Owner]) -> list[Piece]:
        """Enter what was written; undo what was deleted meanwhile. Returns what stays."""
        now, slot_bytes = self._clock(), self.config.slot_bytes
        with self._lock:
            good = [piece for piece in stored if self._deletions.survives(piece.owner, begun)]
            # The first page of a path is the last to go: nothing is worth anything without it.
            for piece in reversed(good):
                self._holdings.add(HeldPage(piece.name, piece.owner, slot_bytes), now)
        if len(good) < len(stored):
            late = [piece.name for piece in set(stored).difference(good)]
            self._link.try_now(lambda: self._objects.remove(late))
        return good

    def _timeout(self, timeout_s: float | None) -> float:
        return self.config.timeout_s if timeout_s is None else timeout_s

"""A store beside a dictionary, under random use and random faults, checked after every step."""

import contextlib
import errno
import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_ext.tiering.caps import Caps, Limit
from sglang_ext.tiering.transfers import PageRef
from sglang_ext.types import PUBLIC, Owner
from tests.tiering.stores import (
    ALICE,
    BOB,
    SLOT_BYTES,
    FakeClock,
    FaultyIO,
    body_of,
    check_books,
    flip,
    get,
    make_store,
    put,
    refs_of,
    slab_files,
)

OWNERS = [ALICE, BOB, PUBLIC]
owners = st.sampled_from(OWNERS)
numbers = st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True)
TOTAL_BYTES = 40 * SLOT_BYTES
CAPS = Caps(
    total_bytes=TOTAL_BYTES,
    limits={
        BOB: Limit(quota_bytes=10 * SLOT_BYTES, hard=True),
        PUBLIC: Limit(reserve_bytes=4 * SLOT_BYTES),
    },
)


class StoreMachine(RuleBasedStateMachine):
    """``maybe`` holds every page that may be there; nothing else must ever be found."""

    encrypted = False

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.clock = FakeClock()
        self.io = FaultyIO()
        self.maybe: set[PageRef] = set()
        self.broken = False
        """A slab may refuse writes since a fault, until the next start."""
        self.open()

    def open(self) -> None:
        self.store = make_store(
            self.folder, encrypted=self.encrypted, io=self.io, clock=self.clock, caps=CAPS
        )

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)

    @rule(owner=owners, chosen=numbers)
    def put(self, owner: Owner, chosen: list[int]) -> None:
        refs = refs_of(owner, chosen)
        stored = put(self.store, refs)
        assert all(stored) or self.broken
        # Later pages of a batch may have evicted the earlier ones of the same owner.
        self.maybe |= {ref for ref, done in zip(refs, stored, strict=True) if done}

    @rule(owner=owners, chosen=numbers)
    def get(self, owner: Owner, chosen: list[int]) -> None:
        refs = refs_of(owner, chosen)
        there = self.store.contains_batch(refs)
        found = get(self.store, refs)  # compares the content
        for ref, hit, promised in zip(refs, found, there, strict=True):
            assert hit <= promised
            assert not hit or ref in self.maybe

    @rule(owner=owners, chosen=numbers)
    def delete(self, owner: Owner, chosen: list[int]) -> None:
        refs = refs_of(owner, chosen)
        self.store.delete(refs)
        assert not any(self.store.contains_batch(refs))
        self.maybe -= set(refs)

    @rule(owner=owners)
    def delete_owner(self, owner: Owner) -> None:
        used = self.store.usage(owner)
        assert self.store.delete_owner(owner) == used
        assert self.store.usage(owner) == 0
        self.maybe = {ref for ref in self.maybe if ref.owner != owner}

    @rule(owner=owners, idle=st.floats(0, 1000))
    def expire(self, owner: Owner, idle: float) -> None:
        used = self.store.usage(owner)
        freed = self.store.expire(owner, self.clock.now - idle)
        assert self.store.usage(owner) == used - freed

    @rule(seconds=st.floats(-2000, 2000))
    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(
        call=st.sampled_from(["read", "write", "reserve"]),
        code=st.sampled_from([errno.EIO, errno.ENOSPC, errno.EPERM]),
        owner=owners,
        chosen=numbers,
    )
    def use_a_failing_disk(self, call: str, code: int, owner: Owner, chosen: list[int]) -> None:
        refs = refs_of(owner, chosen)
        self.io.errors[call] = code
        stored = put(self.store, refs)
        get(self.store, refs)
        self.io.errors.clear()
        self.maybe |= {ref for ref, done in zip(refs, stored, strict=True) if done}
        self.broken |= call == "write" and code == errno.EPERM

    @rule(file=st.integers(0, 100), place=st.integers(0, 40 * SLOT_BYTES), bit=st.integers(0, 7))
    @precondition(lambda self: slab_files(self.folder))
    def flip_a_bit(self, file: int, place: int, bit: int) -> None:
        files = slab_files(self.folder)
        path = files[file % len(files)]
        # A hole must stay a hole, or du would count what the test wrote.
        with path.open("rb") as slab, contextlib.suppress(OSError):
            flip(path, os.lseek(slab.fileno(), place % path.stat().st_size, os.SEEK_DATA), bit)

    @rule(lose=st.sampled_from(["nothing", "word", "index"]))
    def restart(self, lose: str) -> None:
        self.store.close()
        for path in (self.folder / "pages").glob("clean" if lose == "word" else "index*"):
            if lose != "nothing":
                path.unlink()
        self.broken = False
        self.open()

    @invariant()
    def the_books_are_right(self) -> None:
        if not hasattr(self, "store"):
            return
        check_books(self.store, self.folder, TOTAL_BYTES)
        assert self.store.usage(BOB) <= 10 * SLOT_BYTES


class EncryptedStoreMachine(StoreMachine):
    """The same with every owner's pages sealed."""

    encrypted = True


SETTINGS = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestStore = StoreMachine.TestCase
TestStore.settings = SETTINGS
TestEncryptedStore = EncryptedStoreMachine.TestCase
TestEncryptedStore.settings = SETTINGS


def test_the_model_knows_the_right_content() -> None:
    one, other = refs_of(ALICE, [1])[0], refs_of(BOB, [1])[0]
    assert one.key == other.key
    assert body_of(one) != body_of(other)

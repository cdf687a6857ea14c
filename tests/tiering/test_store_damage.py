"""Bytes that changed behind the back of a store are a miss and a count, never content."""

import os
import random
from pathlib import Path

import pytest

from sglang_ext.tiering.page_format import HEADER_BYTES, Reject
from tests.tiering.stores import (
    ALICE,
    BOB,
    BODY_BYTES,
    SLOT_BYTES,
    body_of,
    damage,
    finish,
    flip,
    get,
    make_store,
    put,
    refs_of,
    slab_files,
)

REFS = refs_of(ALICE, range(8))
BOTH = pytest.mark.parametrize("encrypted", [False, True])


@pytest.mark.trial(70)
@BOTH
def test_one_flipped_bit_on_disk_is_a_miss(tmp_path: Path, encrypted: bool) -> None:
    store = make_store(tmp_path, encrypted=encrypted)
    refs = refs_of(ALICE, range(40))
    put(store, refs)
    (path,) = slab_files(tmp_path)
    dice = random.Random(1)
    spots = [*range(0, 102, 5), *dice.sample(range(102, HEADER_BYTES + BODY_BYTES), 19)]
    for slot, spot in zip(range(40), spots, strict=True):
        flip(path, slot * SLOT_BYTES + spot, dice.randrange(8))
    assert not any(get(store, refs))
    assert sum(store.counters.get(reason, 0) for reason in Reject) == 40
    assert store.usage(ALICE) == 0
    finish(store)


@BOTH
def test_zero_filled_truncated_and_swapped_files(tmp_path: Path, encrypted: bool) -> None:
    store = make_store(tmp_path, encrypted=encrypted)
    put(store, REFS)
    (path,) = slab_files(tmp_path)
    damage(path, 0, bytes(2 * SLOT_BYTES))
    content = path.read_bytes()
    third, fourth = (content[n * SLOT_BYTES : (n + 1) * SLOT_BYTES] for n in (2, 3))
    damage(path, 2 * SLOT_BYTES, fourth + third)
    os.truncate(path, 7 * SLOT_BYTES + 5000)
    assert sum(get(store, REFS)) == 3
    counters = store.counters
    assert counters[Reject.EMPTY] == 2
    assert counters[Reject.OTHER_KEY] == 2
    assert counters[Reject.TRUNCATED] == 1
    finish(store)


@pytest.mark.trial(63)
def test_files_of_two_stores_swapped_never_serve_the_other(tmp_path: Path) -> None:
    for name, owner in (("one", ALICE), ("two", BOB)):
        store = make_store(tmp_path / name)
        put(store, refs_of(owner, range(8)))
        store.close()
    (one,), (two,) = slab_files(tmp_path / "one"), slab_files(tmp_path / "two")
    swap = tmp_path / "swap"
    one.rename(swap)
    two.rename(one)
    swap.rename(two)
    store = make_store(tmp_path / "one")
    assert not any(get(store, refs_of(ALICE, range(8))))
    assert store.counters[Reject.OTHER_OWNER] == 8
    finish(store)


@pytest.mark.trial(72)
def test_nothing_readable_and_no_prompt_hash_on_disk(tmp_path: Path) -> None:
    store = make_store(tmp_path, encrypted=True)
    put(store, REFS)
    store.flush()
    store.close()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 4
    for path in files:
        content = path.read_bytes()
        for ref in REFS:
            assert body_of(ref)[:32] not in content, path
            assert ref.key not in content, path


def test_padding_of_a_page_holds_no_bytes_of_another(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    for size in (BODY_BYTES, 100, 5000):
        put(store, refs_of(ALICE, range(size, size + 8)), size)
    for path in slab_files(tmp_path):
        slot_bytes = int(path.stem.partition("-")[2])
        content = path.read_bytes()
        for start in range(0, len(content), slot_bytes):
            slot = content[start : start + slot_bytes]
            sizes = [size for size in (100, 5000, BODY_BYTES) if HEADER_BYTES + size <= slot_bytes]
            assert not slot.strip(b"\0") or any(
                not any(slot[HEADER_BYTES + size :]) for size in sizes[-1:]
            )
    store.close()


def test_the_index_failing_is_counted_and_costs_a_scan_only(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    put(store, REFS)
    for path in (tmp_path / "pages").glob("index.sqlite*"):
        damage(path, 0, b"garbage" * 2000)
    put(store, refs_of(ALICE, range(50, 60)))
    store.flush()
    assert all(get(store, REFS))
    store.close()
    store = make_store(tmp_path)
    assert all(get(store, REFS + refs_of(ALICE, range(50, 60))))
    finish(store)

"""Hours of use in seconds: memory stays flat, the disk below its cap and equal to the books."""

import gc
import os
import random
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from sglang_ext.tiering.caps import Caps, Limit
from sglang_ext.tiering.nvme_store import NvmeStore
from sglang_ext.types import Owner
from tests.tiering.stores import BODY_BYTES, SLOT_BYTES, FakeClock, check_books, get, put, refs_of
from tests.tiering.stores import make_store as open_store

OWNERS = [Owner(f"t:{number}") for number in range(6)]
TOTAL_BYTES = 400 * SLOT_BYTES
CAPS = Caps(
    total_bytes=TOTAL_BYTES,
    limits={
        OWNERS[0]: Limit(quota_bytes=20 * SLOT_BYTES, hard=True),
        OWNERS[1]: Limit(quota_bytes=200 * SLOT_BYTES, reserve_bytes=50 * SLOT_BYTES),
    },
)
KEYS = 3000
"""Pages of each owner that are asked for: far more than fit."""
ROUNDS = 24
ROUNDS_OF_WARM_UP = 8
STEPS = 60
SECONDS_A_STEP = 5
"""``ROUNDS * STEPS`` of them are two hours."""
SLACK_BYTES = 3 * 2**20
SIZES = dict(zip(OWNERS, [BODY_BYTES] * 4 + [2000, 40_000], strict=True))


def step(store: NvmeStore, dice: random.Random, clock: FakeClock) -> None:
    """Do one thing, as a day of traffic does: mostly paths that are asked for again."""
    clock.now += SECONDS_A_STEP
    owner = dice.choice(OWNERS)
    start = int(KEYS * dice.random() ** 5)
    refs = refs_of(owner, [(start + step) % KEYS for step in range(dice.randrange(1, 16))])
    what = dice.random()
    if what < 0.7:
        size = SIZES[owner]
        if not all(get(store, refs, size)):
            put(store, refs, size)
    elif what < 0.94:
        store.contains_batch(refs)
    elif what < 0.97:
        store.delete(refs)
    elif what < 0.995:
        store.expire(owner, clock.now - 1000)
    else:
        store.delete_owner(owner)


@pytest.mark.trial(57)
@pytest.mark.trial(60)
@pytest.mark.trial(73)
@pytest.mark.parametrize("encrypted", [False, True])
def test_two_hours_of_churn(tmp_path: Path, encrypted: bool) -> None:
    clock, dice = FakeClock(), random.Random(6)
    store = open_store(tmp_path, encrypted=encrypted, clock=clock, caps=CAPS)
    resident: list[int] = []
    files: list[int] = []
    for _ in range(ROUNDS):
        for _ in range(STEPS):
            step(store, dice, clock)
        check_books(store, tmp_path, TOTAL_BYTES)
        assert store.usage(OWNERS[0]) <= 20 * SLOT_BYTES
        store.flush()
        resident.append(resident_bytes())
        files.append(bytes_beside_pages(tmp_path))
    assert store.counters["evicted"] > 1000, "a store that is never full proves nothing"
    assert store.counters["hit"] > 1000
    assert max(resident[ROUNDS_OF_WARM_UP:]) <= resident[ROUNDS_OF_WARM_UP - 1] + SLACK_BYTES
    assert max(files) <= 8 * 2**20, "index and keys stay small"
    store.close()
    check_restart(tmp_path, lambda: open_store(tmp_path, encrypted=encrypted, caps=CAPS))


def check_restart(folder: Path, reopen: Callable[[], NvmeStore]) -> None:
    """What is left at the end is all there at the next start."""
    store = reopen()
    check_books(store, folder, TOTAL_BYTES)
    assert len(store.owners()) >= 3
    assert "leftover" not in store.counters
    store.close()


def resident_bytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def bytes_beside_pages(folder: Path) -> int:
    paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".slab"]
    return sum(os.stat(path).st_blocks * 512 for path in paths)

"""A store on file systems that are really full, or really read-only; needs the right to mount."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sglang_ext.errors import StoreError
from tests.tiering.stores import ALICE, SLOT_BYTES, finish, get, make_store, put, refs_of

SIZE_BYTES = 6 * 2**20
FITS = SIZE_BYTES // SLOT_BYTES // 2
"""So many pages fit in any case, beside the index."""


@contextmanager
def mounted(folder: Path) -> Iterator[Path]:
    """Yield a file system of ``SIZE_BYTES`` in memory."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "tmpfs", folder]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def remount(folder: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", folder], check=True, capture_output=True)


@pytest.mark.trial(60)
def test_a_full_disk_below_the_cap_serves_and_goes_on(tmp_path: Path) -> None:
    """Its cap promises ten times what there is."""
    with mounted(tmp_path) as folder:
        store = make_store(folder, total=10 * SIZE_BYTES)
        for start in range(0, 800, 8):
            refs = refs_of(ALICE, range(start, start + 8))
            put(store, refs)
        assert store.counters["no_space"] > 0
        assert store.usage(ALICE) >= FITS * SLOT_BYTES
        assert all(get(store, refs)), "the newest pages replace the oldest"
        store.flush()
        store.close()
        finish(make_store(folder, total=SIZE_BYTES // 2))


@pytest.mark.trial(59)
def test_a_read_only_disk_is_refused_and_loses_nothing(tmp_path: Path) -> None:
    with mounted(tmp_path) as folder:
        store = make_store(folder, total=SIZE_BYTES // 2)
        refs = refs_of(ALICE, range(8))
        put(store, refs)
        store.close()
        remount(folder, "ro")
        with pytest.raises(StoreError, match="cannot be written"):
            make_store(folder, total=SIZE_BYTES // 2)
        remount(folder, "rw")
        store = make_store(folder, total=SIZE_BYTES // 2)
        assert all(get(store, refs))
        finish(store)

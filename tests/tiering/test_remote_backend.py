"""Two servers' storage backends over one shared store, called as HiCache calls them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_ext.tiering import remote_open
from sglang_ext.tiering.remote_memory import MemoryObjects, Shelf
from sglang_ext.tiering.remote_names import held_pages
from sglang_ext.tiering.storage_backend import ExtStorage
from tests.tiering.stores import ALICE, BOB, MASTER
from tests.tiering.test_storage_backend import (
    _plain_memory,
    content,
    indices,
    keys_of,
    make_pool,
    make_storage,
)

__all__ = ["_plain_memory"]

REMOTE = {"remote": {"master": "nowhere:1", "total_bytes": 2**30}, "master_key": "env:MASTER"}


class Server:
    """One backend and its pool, with a disk of its own."""

    def __init__(self, folder: Path) -> None:
        self.pool: Any = make_pool()
        self.storage: ExtStorage = make_storage(folder, self.pool, extra=REMOTE)
        self.storage.copies = lambda owner: True
        self.storage.remote_lifetime_s = lambda owner: 1e9
        self.storage.encrypt([BOB])


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Shelf:
    shelf = Shelf()
    monkeypatch.setattr(remote_open, "_objects", lambda given: MemoryObjects(shelf))
    monkeypatch.setenv("MASTER", MASTER.hex())
    return shelf


@pytest.fixture
def servers(shelf: Shelf, tmp_path: Path) -> Iterator[list[Server]]:
    servers = [Server(tmp_path / name) for name in ("first", "second")]
    yield servers
    for server in servers:
        server.storage.close()


@pytest.mark.parametrize("owner", [ALICE, BOB])
def test_what_one_server_wrote_another_reads(servers: list[Server], owner: str) -> None:
    one, two = (server.storage for server in servers)
    keys = keys_of(1, 2, 3)
    one.note_owner(keys, owner)
    assert one.batch_set_v1(keys, indices(0, 1, 2)) == [True] * 3
    two.note_owner(keys, owner)
    assert two.batch_exists([*keys, *keys_of(4)]) == 3
    assert two.batch_get_v1(keys, indices(4, 5, 6)) == [True] * 3
    for page in (0, 1, 2):
        assert torch.equal(content(servers[0].pool, page), content(servers[1].pool, page + 4))


def test_a_path_may_lie_half_here_and_half_there(servers: list[Server]) -> None:
    one, two = (server.storage for server in servers)
    keys = keys_of(1, 2, 3, 4)
    for storage in (one, two):
        storage.note_owner(keys, ALICE)
    one.batch_set_v1(keys[2:], indices(2, 3))
    two.batch_set_v1(keys[:2], indices(0, 1))
    two.store.delete_owner(ALICE)
    one.store.delete_owner(ALICE)
    two.batch_set_v1(keys[:2], indices(0, 1))
    assert two.batch_exists(keys) == 4
    assert two.batch_get_v1(keys, indices(4, 5, 6, 7)) == [True] * 4
    assert torch.equal(content(servers[1].pool, 4), content(servers[1].pool, 0))
    assert torch.equal(content(servers[1].pool, 7), content(servers[0].pool, 3))


@pytest.mark.trial(63)
def test_another_owner_reads_nothing(servers: list[Server]) -> None:
    one, two = (server.storage for server in servers)
    one.note_owner(keys_of(1), ALICE)
    one.batch_set_v1(keys_of(1), indices(0))
    two.note_owner(keys_of(1), BOB)
    assert two.batch_exists(keys_of(1)) == 0
    assert two.batch_get_v1(keys_of(1), indices(1)) == [False]


def test_a_start_keeps_the_encrypted_pages_that_are_there(
    servers: list[Server], tmp_path: Path
) -> None:
    one = servers[0].storage
    one.note_owner(keys_of(1), BOB)
    one.batch_set_v1(keys_of(1), indices(0))
    third = Server(tmp_path / "third").storage
    third.note_owner(keys_of(1), BOB)
    assert third.batch_get_v1(keys_of(1), indices(1)) == [True]
    third.close()


def test_an_engine_leaves_the_tenants_of_others_alone(
    servers: list[Server], shelf: Shelf, tmp_path: Path
) -> None:
    """Its policy does not name them, so it does not know that theirs is to be encrypted."""
    one = servers[0].storage
    one.note_owner(keys_of(1), BOB)
    one.batch_set_v1(keys_of(1), indices(0))
    before = dict(shelf.objects)
    other = make_storage(tmp_path / "other", make_pool(), extra=REMOTE)
    other.copies = lambda owner: owner == ALICE
    other.encrypt([])
    assert other.remote is not None and other.remote.answers
    assert shelf.objects == before
    other.close()


def test_a_dead_store_costs_nothing_of_what_the_disk_does(
    servers: list[Server], shelf: Shelf
) -> None:
    storage = servers[0].storage
    shelf.silent = True
    keys = keys_of(1, 2)
    storage.note_owner(keys, ALICE)
    assert storage.batch_set_v1(keys, indices(0, 1)) == [True] * 2
    assert storage.batch_exists([*keys, *keys_of(3)]) == 2
    assert storage.batch_get_v1(keys, indices(4, 5)) == [True] * 2


def test_deleted_pages_are_gone_for_everybody(servers: list[Server], shelf: Shelf) -> None:
    one, two = (server.storage for server in servers)
    for storage in (one, two):
        storage.note_owner(keys_of(1, 2), ALICE)
    one.batch_set_v1(keys_of(1, 2), indices(0, 1))
    assert one.remote is not None
    assert one.remote.delete_owner(ALICE) > 0
    assert two.batch_exists(keys_of(1, 2)) == 0
    assert not list(held_pages(shelf.objects))

"""Two servers over one shared store: who finds what, whose it is, and what a flush takes."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from sglang_ext.errors import PolicyError
from sglang_ext.tenancy.loader import parse_policy
from sglang_ext.tier_metrics import capacities, held_bytes
from sglang_ext.tiering import remote_open
from sglang_ext.tiering.remote_memory import MemoryObjects, Shelf
from sglang_ext.tiering.remote_names import held_pages
from sglang_ext.types import PUBLIC, Owner, Tier
from tests.sglang_ext.test_tiers import (
    SYSTEM,
    TEXT,
    fetch,
    fill,
    leave_memory,
    load,
    page_bytes,
)
from tests.sglang_ext.tiered import TieredRig, tiered

A, B = Owner("t:a"), Owner("t:b")
TENANTS = "a: {}, b: {}, fixed: {ttl: {since: created}}"
REMOTE_BYTES = 2**20


class Servers:
    """Two rigs, each with a disk of its own, over one shelf."""

    def __init__(self, shelf: Shelf, first: TieredRig, second: TieredRig) -> None:
        self.shelf, self.first, self.second = shelf, first, second

    def held(self) -> set[Owner]:
        return {page.owner for page in held_pages(self.shelf.objects)}

    def hear(self) -> None:
        """Let the second hear of what the first did, as its thread does every few seconds."""
        self.second.cache.store.backend.remote.refresh()
        self.second.later(0)


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    shelf = Shelf()
    monkeypatch.setattr(remote_open, "_objects", lambda given: MemoryObjects(shelf))
    with ExitStack() as stack:
        rigs = [
            stack.enter_context(
                tiered(tmp_path / name, [SYSTEM], tenants=TENANTS, remote_bytes=REMOTE_BYTES)
            )
            for name in ("first", "second")
        ]
        yield Servers(shelf, *rigs)


@pytest.mark.trial(51)
def test_what_one_server_computed_another_fetches_bit_for_bit(servers: Servers) -> None:
    fill(servers.first)
    text = [*SYSTEM, *TEXT]
    servers.first.write(text, "t:a")
    before = page_bytes(servers.first, text, "t:a").clone()
    assert servers.held() == {A, PUBLIC}
    fill(servers.second)
    assert fetch(servers.second, text, "t:b") == len(SYSTEM), "nothing but the public text"
    leave_memory(servers.second)
    assert fetch(servers.second, text, "t:a") == len(text)
    load(servers.second, text, "t:a")
    assert torch.equal(page_bytes(servers.second, text, "t:a"), before)


def test_what_is_there_is_not_written_again(servers: Servers) -> None:
    servers.first.write(TEXT)
    sent = servers.shelf.transfers
    servers.second.write(TEXT)
    assert servers.shelf.transfers == sent
    assert servers.second.cache.store.counters()["remote_already_there"] == len(TEXT) // 4


def test_a_flush_takes_a_tenant_from_every_server(servers: Servers) -> None:
    for rig in (servers.first, servers.second):
        rig.write(TEXT, "t:a")
        rig.write(TEXT, "t:b")
    flushed = servers.first.cache.flush(A)
    assert (flushed.disk_bytes > 0, (flushed.remote_bytes or 0) > 0) == (True, True)
    assert servers.held() == {B}
    servers.hear()
    second = servers.second.cache
    assert servers.second.where(TEXT, "t:a") == (0, 0)
    assert A not in second.store.backend.store.owners()
    assert servers.second.where(TEXT, "t:b")[0] == len(TEXT)
    leave_memory(servers.second)
    assert fetch(servers.second, TEXT, "t:a") == 0
    assert fetch(servers.second, TEXT, "t:b") == len(TEXT)


def test_what_came_after_a_flush_stays(servers: Servers) -> None:
    servers.first.write(TEXT)
    servers.first.cache.flush(A)
    servers.hear()
    servers.second.write(TEXT)
    servers.hear()
    assert servers.second.where(TEXT)[0] == len(TEXT)
    assert servers.held() == {A}


def test_pages_with_an_end_of_their_own_stay_on_their_machine(servers: Servers) -> None:
    servers.first.write(TEXT, "t:fixed")
    servers.first.write(TEXT, "t:system")
    assert servers.held() == set()
    assert servers.first.cache.store.held_bytes()[Owner("t:fixed")] > 0


def test_the_books_show_the_whole_store_to_every_server(servers: Servers) -> None:
    servers.first.write(TEXT)
    servers.hear()
    for rig in (servers.first, servers.second):
        rows = {tier: tokens for tier, tokens, _ in rig.cache.store.rows(A)}
        assert rows[Tier.REMOTE] == len(TEXT)
        assert held_bytes(rig.cache)[A, Tier.REMOTE] > 0
        assert capacities(rig.cache)[Tier.REMOTE] > 0
    policy = parse_policy("version: 1\ntenants: {b: {}}")
    servers.second.cache.store.use(policy, servers.second.cache.store.book(policy))
    assert (A, Tier.REMOTE) not in held_bytes(servers.second.cache), "another engine's tenant"
    (second,) = [tokens for tier, tokens, _ in servers.second.cache.store.rows(A) if tier == "nvme"]
    assert second == 0


def test_quotas_of_the_remote_tier_hold_over_both(servers: Servers) -> None:
    policy = parse_policy("version: 1\ntenants: {a: {quota: {remote: 16tok, hard: true}}}")
    for rig in (servers.first, servers.second):
        store = rig.cache.store
        store.use(policy, store.book(policy))
    servers.first.write(TEXT)
    servers.hear()
    servers.second.write(list(range(100, 116)))
    assert sum(page.owner == A for page in held_pages(servers.shelf.objects)) == 4
    with pytest.raises(PolicyError, match="remote"):
        too_much = "version: 1\ntenants: {a: {reserve: {remote: 1000ktok}}}"
        servers.first.cache.store.book(parse_policy(too_much))


def test_other_weights_find_nothing_and_leave_what_others_need(servers: Servers) -> None:
    servers.first.write(TEXT)
    servers.second.cache.weights_changed(flushed=True)
    assert fetch(servers.second, TEXT, "t:a") == 0
    leave_memory(servers.first)
    servers.first.cache.store.delete_owner(A)
    assert fetch(servers.first, TEXT, "t:a") == len(TEXT)


@pytest.mark.trial(65)
def test_a_store_that_is_gone_is_a_miss(servers: Servers) -> None:
    servers.first.write(TEXT)
    servers.shelf.silent = True
    assert fetch(servers.second, TEXT, "t:a") == 0
    servers.second.write(TEXT)
    leave_memory(servers.second)
    assert fetch(servers.second, TEXT, "t:a") == len(TEXT), "from its own disk"

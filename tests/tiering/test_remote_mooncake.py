"""A real Mooncake store whose processes are killed and frozen: misses, and it comes back."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_ext.errors import UnsupportedError
from sglang_ext.tiering import remote_mooncake
from sglang_ext.tiering.caps import Caps
from sglang_ext.tiering.page_format import HEADER_BYTES
from sglang_ext.tiering.remote_config import RemoteConfig
from sglang_ext.tiering.remote_mooncake import MooncakeAddress, MooncakeObjects, check_installed
from sglang_ext.tiering.remote_names import held_pages
from sglang_ext.tiering.remote_objects import Reply, StoreSilent
from sglang_ext.tiering.remote_store import RemoteStore
from sglang_ext.types import Owner
from tests.mooncake import Cluster, await_that, end, start_cluster
from tests.tiering.remotes import make_remote
from tests.tiering.stores import ALICE, get, put, refs_of

LENT_BYTES = 64 * 2**20
REFS = refs_of(ALICE, range(6))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = start_cluster(tmp_path, LENT_BYTES)
    yield cluster
    cluster.stop()


@pytest.fixture
def store(cluster: Cluster) -> Iterator[RemoteStore]:
    """As a server has it, with its thread."""
    config: RemoteConfig = make_remote(MooncakeObjects(cluster.address)).config
    store = RemoteStore(config, MooncakeObjects(cluster.address))
    store.start()
    assert store.answers
    yield store
    store.close()


def test_a_killed_master_is_left_alone_and_used_again(cluster: Cluster, store: RemoteStore) -> None:
    assert all(put(store, REFS))
    end(cluster.master)
    assert get(store, REFS, timeout_s=2.0) == [False] * 6
    assert not store.answers
    assert put(store, REFS) == [False] * 6
    cluster.start_master()
    await_that(lambda: all(put(store, REFS)))
    assert all(get(store, REFS))


def test_a_frozen_master_is_waited_for_no_longer_than_the_deadline(
    cluster: Cluster, store: RemoteStore
) -> None:
    assert all(put(store, REFS))
    os.kill(cluster.master.pid, signal.SIGSTOP)
    assert get(store, REFS, timeout_s=0.2) == [False] * 6
    await_that(lambda: not store.answers)
    os.kill(cluster.master.pid, signal.SIGCONT)
    await_that(lambda: store.answers and all(get(store, REFS)))


def test_a_killed_peer_takes_its_pages_with_it_and_nothing_else(
    cluster: Cluster, store: RemoteStore
) -> None:
    assert all(put(store, REFS))
    (lender,) = cluster._lenders
    end(lender)
    assert get(store, REFS) == [False] * 6
    assert not any(put(store, refs_of(ALICE, range(50, 53))))
    cluster.lend(LENT_BYTES)
    await_that(lambda: store.answers and all(put(store, REFS)) and all(get(store, REFS)))


def test_a_server_may_start_before_its_store(cluster: Cluster) -> None:
    end(cluster.master)
    config = make_remote(MooncakeObjects(cluster.address)).config
    store = RemoteStore(config, MooncakeObjects(cluster.address))
    store.start()
    try:
        assert put(store, REFS) == [False] * 6
        cluster.start_master()
        await_that(lambda: all(put(store, REFS)))
    finally:
        store.close()


@pytest.mark.trial(60)
def test_a_full_store_drops_the_oldest_by_itself(cluster: Cluster, store: RemoteStore) -> None:
    """Its memory being smaller than the policy says: what it dropped is a miss, and all goes on."""
    for start in range(0, 400, 50):
        put(store, refs_of(ALICE, range(start, start + 50)), 200_000)
    store.refresh()
    assert 0 < store.usage(ALICE) <= LENT_BYTES
    newest = refs_of(ALICE, [1000])
    await_that(lambda: all(put(store, newest)))
    assert all(get(store, newest))


@pytest.mark.trial(60)
def test_a_store_that_may_drop_nothing_refuses_and_everything_goes_on(
    cluster: Cluster, store: RemoteStore
) -> None:
    """Mooncake keeps for a while what was just read, and has no room for others meanwhile."""
    written = 0
    while not store.counters.get("full"):
        refs = refs_of(ALICE, range(written, written + 50))
        written += 50
        assert written < 1000, "it was never full"
        put(store, refs, 200_000)
        get(store, refs, 200_000)
    assert store.answers
    store.refresh()
    assert 0 < store.usage(ALICE) <= LENT_BYTES
    assert any(get(store, refs_of(ALICE, range(written)), 200_000))


@pytest.mark.trial(60)
def test_the_store_stays_below_its_cap_over_all_machines(cluster: Cluster) -> None:
    """Both write without pause; each knows of the other what the last list said."""
    held = Caps(total_bytes=40 * (HEADER_BYTES + 9000))
    machines = [
        make_remote(MooncakeObjects(cluster.address), caps=held, page_bytes=9000) for _ in range(2)
    ]
    for step in range(20):
        for number, machine in enumerate(machines):
            machine.refresh()
            put(machine, refs_of(Owner(f"t:{number}"), range(10 * step, 10 * step + 10)), 9000)
            pages = list(held_pages(machine._objects.names()))
            assert sum(page.bytes for page in pages) <= held.total_bytes
    assert sum(machine.counters["evicted"] for machine in machines) >= 300
    for machine in machines:
        machine.check_integrity()
        machine.close()


@pytest.mark.trial(62)
def test_what_a_killed_machine_left_is_known_to_the_next(cluster: Cluster) -> None:
    """Its pages are used, counted and deleted; what it only began to write is no page."""
    killed = subprocess.Popen(
        [sys.executable, "-m", "tests.tiering.remote_node", *_place(cluster)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert killed.stdin is not None and killed.stdout is not None
    killed.stdin.write(b"put 0 6\n")
    killed.stdin.flush()
    assert json.loads(killed.stdout.readline()) == [True] * 6
    (lender,) = cluster._lenders
    begun = cluster.puts_begun()
    os.kill(lender.pid, signal.SIGSTOP)
    killed.stdin.write(b"put 6 6\n")
    killed.stdin.flush()
    await_that(lambda: cluster.puts_begun() > begun)
    end(killed)
    os.kill(lender.pid, signal.SIGCONT)
    store = make_remote(MooncakeObjects(cluster.address))
    try:
        assert store.usage(ALICE) == 6 * store.config.slot_bytes
        assert get(store, refs_of(ALICE, range(12))) == [True] * 6 + [False] * 6
        begun_refs = refs_of(ALICE, range(6, 12))
        await_that(lambda: all(put(store, begun_refs)) and all(get(store, begun_refs)))
        store.delete_owner(ALICE)
        assert not list(held_pages(store._objects.names()))
    finally:
        store.close()


def _place(cluster: Cluster) -> list[str]:
    assert cluster.address.admin is not None
    return [cluster.address.master, cluster.address.admin]


def test_the_client_answers_in_our_words(cluster: Cluster) -> None:
    objects = MooncakeObjects(cluster.address)
    buffer = objects.buffer(4096)
    buffer[:5] = b"first"
    assert objects.put(["a/1", "a.2"], [buffer[:5], buffer[:100]]) == [Reply.DONE] * 2
    buffer[:5] = b"other"
    assert objects.put(["a/1"], [buffer[:5]]) == [Reply.DONE]
    found = objects.get(["a/1", "none", "a.2"], [buffer[:9], buffer[9:20], buffer[20:30]])
    assert found == [5, Reply.ABSENT, Reply.FAILED]
    assert bytes(buffer[:5]) == b"first"
    assert objects.put(["b", "b"], [buffer[:5], buffer[:5]]) == [Reply.DONE] * 2
    assert objects.get(["b", "a/1", "b"], [buffer[10:15], buffer[20:25], buffer[30:35]]) == [5] * 3
    assert bytes(buffer[10:15]) == bytes(buffer[30:35]) == b"first"
    assert objects.remove(["b"]) == 1
    assert objects.exist(["a/1", "none"]) == [True, False]
    assert sorted(objects.names()) == ["a.2", "a/1"]
    assert objects.remove(["none", "a.2"]) == 1
    assert objects.remove_matching("a[.].*") == 0
    assert objects.remove_matching("a/.*") == 1
    objects.close()


def test_no_store_at_all_is_silent() -> None:
    try:
        check_installed()
    except UnsupportedError as error:
        pytest.skip(str(error))
    objects = MooncakeObjects(MooncakeAddress(master="127.0.0.1:1"))
    with pytest.raises(StoreSilent, match="127.0.0.1:1"):
        objects.exist(["a"])


def test_without_the_client_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError("libibverbs.so.1: cannot open shared object file")

    monkeypatch.setattr(remote_mooncake.importlib, "import_module", missing)
    with pytest.raises(UnsupportedError, match=r"libibverbs.so.1.*pip install 'sglang-ext\[remote"):
        check_installed()


def test_the_admin_port_is_that_of_the_master_s_machine() -> None:
    assert MooncakeAddress(master="kv:50051").admin_url == "http://kv:9003"
    assert MooncakeAddress(master="[::1]:50051").admin_url == "http://[::1]:9003"
    assert MooncakeAddress(master="[::1]:50051").host_port == ("::1", 50051)
    assert MooncakeAddress(master="kv:1", admin="http://other:5").admin_url == "http://other:5"

"""What sealed tenants leave in the pools of SGLang's own cache: zeros."""

import pkgutil
from array import array
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams

from sglang_ext.errors import UnsupportedError
from sglang_ext.namespace import frame, is_sealed
from sglang_ext.patches.scheduling import TenantScheduling
from sglang_ext.patches.sealed_pages import sealed_pages_hooks
from sglang_ext.patches.versions import check_signature
from sglang_ext.radix.integrity import walk
from sglang_ext.sealing import Sealing, _by_page
from sglang_ext.tenancy.loader import parse_policy
from sglang_ext.types import Owner
from tests.radix.caches import make_rig, namespace
from tests.sglang_ext.test_prefix_cache import Request
from tests.sglang_ext.test_tiers import fetch, load
from tests.sglang_ext.tiered import PAGE, TieredRig, tiered

SECRET, OTHER = 1.0, 2.0
BANK, PLAIN = "s:bank", "t:a"
TENANTS = "a: {}, bank: {isolation: sealed}"
KEY = "SEALING_TEST_KEY"
RUN = torch.full((32,), SECRET, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
"""What 32 numbers of a sealed page look like."""


@pytest.fixture(autouse=True)
def hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the hooks on SGLang's pools, as its registry does in a server."""
    for hook in sealed_pages_hooks():
        place, _, name = hook.target.rpartition(".")
        pool = pkgutil.resolve_name(place)
        monkeypatch.setattr(pool, name, _wrapped(getattr(pool, name), hook.function))
    monkeypatch.setenv(KEY, "5e" * 32)


def _wrapped(original: Any, function: Callable[..., Any]) -> Any:
    @wraps(original)
    def run(pool: Any, *args: Any) -> Any:
        return function(original, pool, *args)

    return run


class Vault:
    """A tiered cache in which each owner writes numbers of its own."""

    def __init__(self, rig: TieredRig) -> None:
        self.rig, self.cache = rig, rig.cache
        self.cache.sealing = Sealing(self.cache)
        assert self.cache.sealing.problem is None
        self.pool: Any = rig.allocator.get_kvcache()
        self.host: Any = self.cache.cache_controller.mem_pool_host.anchor_entry.host_pool

    def layers(self) -> list[torch.Tensor]:
        return [*self.pool.k_buffer, *self.pool.v_buffer]

    def write(self, slots: torch.Tensor, owner: str) -> None:
        """Do what a batch of this owner does: be noted, then fill its slots."""
        if is_sealed(Owner(owner)):
            self.cache.sealing.in_hbm(slots)
        for layer in self.layers():
            layer[slots] = SECRET if is_sealed(Owner(owner)) else OTHER

    def compute(self, tokens: list[int], owner: str) -> None:
        """Match, compute the rest, insert and let it be copied down."""
        self._insert(tokens, owner, blind=False)
        self.rig.settle()

    def compute_blind(self, tokens: list[int], owner: str) -> None:
        """Compute all of it though it may be cached: the insert frees what is there twice."""
        self._insert(tokens, owner, blind=True)
        self.rig.settle()

    def _insert(self, tokens: list[int], owner: str, blind: bool) -> None:
        rig = self.rig
        found = None if blind else rig.match(tokens, owner)
        held = 0 if found is None else found.device_prefix_len
        node = rig.core.root_node_handle() if found is None else found.last_device_node
        lock = self.cache.lock(node)
        fresh = rig.alloc(len(tokens) - held)
        self.write(fresh, owner)
        cached = rig.core.collect_full_device_indices(node, rig.core.root_node_handle())
        params = InsertParams(
            key=rig.key(tokens, owner),
            value=torch.cat((cached, fresh)),
            prev_prefix_len=held,
            inserted_len=held,
        )
        self.cache.insert(params)
        self.cache.unlock(lock)

    def abort(self, tokens: list[int], owner: str) -> None:
        """Compute, and end before anything is inserted."""
        slots = self.rig.alloc(len(tokens))
        self.write(slots, owner)
        self.rig.allocator.free_segment(slots, start_pos=0)

    def check(self) -> None:
        """No free page holds a sealed number, every cached one holds all of them."""
        pages = self.rig.allocator.get_all_free_pages()
        free = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()
        in_host = torch.cat((self.host.free_slots, *self.host.release_slots))
        assert not any((layer[free] == SECRET).any() for layer in self.layers())
        assert not (self.host.kv_buffer[:, :, in_host] == SECRET).any()
        for node in walk(self.rig.core):
            number = SECRET if is_sealed(node.owner) else OTHER
            full = node.component_data[0]
            if full.value is not None:
                assert all((layer[full.value] == number).all() for layer in self.layers())
            if full.host_value is not None:
                assert (self.host.kv_buffer[:, :, full.host_value] == number).all()

    def anywhere(self) -> bool:
        """Tell whether a sealed number is left in any pool."""
        in_hbm = any((layer == SECRET).any() for layer in self.layers())
        return in_hbm or bool((self.host.kv_buffer == SECRET).any())


@pytest.fixture
def vault(tmp_path: Path) -> Iterator[Vault]:
    with tiered(tmp_path, tenants=TENANTS, master_key=f"env:{KEY}") as rig:
        yield Vault(rig)


def text(number: int, pages: int = 4) -> list[int]:
    return [number * 100 + token for token in range(pages * PAGE)]


def evict(vault: Vault) -> None:
    vault.rig.evict(10**6)


def evict_both(vault: Vault) -> None:
    vault.rig.evict(10**6)
    vault.cache.evict_host(10**6)


def flush(vault: Vault) -> None:
    vault.cache.flush(Owner(BANK))


def reset(vault: Vault) -> None:
    """Do what SGLang does with /flush_cache."""
    vault.cache.reset()
    vault.rig.allocator.clear()


@pytest.mark.parametrize("end", [evict_both, flush, reset])
def test_what_ends_a_cached_page_zeroes_it(vault: Vault, end: Callable[[Vault], None]) -> None:
    vault.compute(text(1), BANK)
    vault.compute(text(1), PLAIN)
    assert vault.anywhere()
    end(vault)
    vault.check()
    assert not vault.anywhere()


def test_a_page_that_moves_down_leaves_zeros_above(vault: Vault) -> None:
    vault.compute(text(1), BANK)
    evict(vault)
    vault.check()
    assert vault.rig.where(text(1), BANK) == (0, 16)
    assert (vault.host.kv_buffer == SECRET).any()


def test_an_abort_leaves_zeros(vault: Vault) -> None:
    vault.abort(text(1), BANK)
    vault.check()
    assert not vault.anywhere()


def test_a_duplicate_leaves_zeros_and_the_cached_page_stays(vault: Vault) -> None:
    vault.compute(text(1), BANK)
    vault.compute_blind(text(1), BANK)
    vault.check()
    assert vault.rig.hit(text(1), BANK) == 16


def test_a_group_of_frees_leaves_zeros(vault: Vault) -> None:
    """The scheduler collects what the requests of a batch free, and frees it at once."""
    vault.rig.allocator.free_group_begin()
    vault.abort(text(1), BANK)
    vault.abort(text(2), PLAIN)
    vault.rig.allocator.free_group_end()
    vault.check()
    assert not vault.anywhere()


@pytest.mark.parametrize("length", [5, 8, 11])
def test_the_uncached_tail_of_a_request_leaves_zeros(vault: Vault, length: int) -> None:
    class Writes(Request):
        def compute(self, up_to: int) -> None:
            before = self.held
            super().compute(up_to)
            row = vault.cache.req_to_token_pool.req_to_token[self.kv.req_pool_idx]
            vault.write(row[before : self.held].to(torch.int64), BANK)

    request = Writes(vault.rig, text(1)[:length], namespace(BANK), 1)
    request.admit()
    request.compute(length)
    request.checkpoint(length)
    request.finish([7, 7])
    vault.rig.settle()
    vault.check()
    flush(vault)
    assert not vault.anywhere()


def test_what_comes_back_from_the_disk_is_zeroed_as_well(vault: Vault, tmp_path: Path) -> None:
    vault.compute(text(1), BANK)
    evict_both(vault)
    assert not vault.anywhere()
    assert fetch(vault.rig, text(1), BANK) == 16
    assert (vault.host.kv_buffer == SECRET).any()
    load(vault.rig, text(1), BANK)
    vault.check()
    assert vault.rig.where(text(1), BANK)[0] == 16
    evict_both(vault)
    vault.check()
    assert not vault.anywhere()
    assert not any(RUN in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_neither_pools_nor_files_hold_token_ids(vault: Vault, tmp_path: Path) -> None:
    """Pools hold numbers and slots, files numbers and hashes; before a flush and after it."""
    ids = [1_000_003 + 7 * token for token in range(16)]
    runs = [array(kind, ids[:PAGE]).tobytes() for kind in "iq"]
    vault.compute(ids, BANK)
    evict_both(vault)
    assert fetch(vault.rig, ids, BANK) == 16
    load(vault.rig, ids, BANK)
    for end in (lambda: None, lambda: flush(vault)):
        end()
        pools = [*vault.layers(), vault.host.kv_buffer]
        pools += [vault.cache.req_to_token_pool.req_to_token, vault.host.free_slots]
        contents = [pool.contiguous().view(torch.uint8).numpy().tobytes() for pool in pools]
        contents += [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
        assert not any(run in content for run in runs for content in contents)


def test_the_disk_holds_the_numbers_of_who_is_not_sealed(vault: Vault, tmp_path: Path) -> None:
    """Otherwise the test above could not fail."""
    vault.compute(text(1), PLAIN)
    run = RUN.replace(b"\x80\x3f", b"\x00\x40")
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert any(run in content for content in files)


def test_a_sealed_owner_that_left_the_policy_writes_nothing_to_the_disk(vault: Vault) -> None:
    store = vault.cache.store
    assert store is not None
    store.use(*_without_bank(store))
    vault.compute(text(1), BANK)
    vault.compute(text(1), PLAIN)
    assert set(store.held_bytes()) == {PLAIN}


def _without_bank(store: Any) -> tuple[Any, Any]:
    policy = parse_policy("version: 1\ntenants: {a: {}}")
    return policy, store.book(policy)


@pytest.mark.parametrize("seed", range(8))
def test_no_free_page_ever_holds_a_sealed_number(vault: Vault, seed: int) -> None:
    random = Random(seed)
    owners = [BANK, BANK, PLAIN, "s:other"]

    def texts() -> tuple[list[int], str]:
        return text(random.randint(1, 4), random.randint(1, 5)), random.choice(owners)

    def fetched() -> None:
        fetch(vault.rig, *texts())

    steps: list[Callable[[], Any]] = [
        *[lambda: vault.compute(*texts())] * 4,
        lambda: vault.compute_blind(*texts()),
        lambda: vault.abort(*texts()),
        lambda: vault.rig.evict(random.randint(1, 40)),
        lambda: vault.cache.evict_host(random.randint(1, 40)),
        lambda: vault.cache.flush(Owner(random.choice(owners))),
        fetched,
        lambda: reset(vault) if random.random() < 0.1 else None,
    ]
    for _ in range(60):
        random.choice(steps)()
        vault.rig.settle()
        vault.check()
    for owner in owners:
        vault.cache.flush(Owner(owner))
    vault.check()
    assert not vault.anywhere()
    assert vault.cache.sealing._hbm.wiped_pages > 0
    assert vault.cache.sealing._cpu.wiped_pages > 0


def _batch(*owners: str, slots: torch.Tensor | None) -> Any:
    reqs = [
        SimpleNamespace(rid=f"{owner[2:]}/1", origin_input_ids=[1], extra_key=frame(Owner(owner)))
        for owner in owners
    ]
    return SimpleNamespace(reqs=reqs, out_cache_loc=slots)


def test_a_batch_with_a_sealed_row_is_noted_before_it_runs(vault: Vault) -> None:
    policy = parse_policy(f"version: 1\ntenants: {{{TENANTS}}}")
    scheduling = TenantScheduling(policy, lambda: None)  # type: ignore[arg-type, return-value]
    scheduling.cache = vault.cache
    plain, mixed = vault.rig.alloc(8), vault.rig.alloc(8)
    scheduling.note_sealed(_batch(PLAIN, slots=plain))
    scheduling.note_sealed(_batch(PLAIN, BANK, slots=mixed))
    scheduling.note_sealed(_batch(BANK, slots=None))
    for layer in vault.layers():
        layer[plain] = OTHER
        layer[mixed] = SECRET
    for slots in (plain, mixed):
        vault.rig.allocator.free_segment(slots, start_pos=0)
    vault.check()
    assert (vault.layers()[0][plain] == OTHER).all()


def test_the_hooks_fit_sglang() -> None:
    for hook in sealed_pages_hooks():
        check_signature(pkgutil.resolve_name(hook.target), hook.parameters)


def test_an_engine_that_cannot_zero_refuses_sealed_tenants_and_no_others() -> None:
    sealing = Sealing(make_rig(64, PAGE).cache)
    sealing.check(parse_policy("version: 1\ntenants: {a: {}}"))
    with pytest.raises(UnsupportedError, match=r"tenants.bank.isolation: sealed does not work"):
        sealing.check(parse_policy(f"version: 1\ntenants: {{{TENANTS}}}"))


@pytest.mark.parametrize("type_", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("width", [8, 3])
def test_pages_of_any_type_and_width_are_zeroed_whole(type_: torch.dtype, width: int) -> None:
    layer = torch.full((11, 1, width), 1.0).to(type_)
    _by_page(layer, PAGE).index_fill_(0, torch.tensor([1]), 0)
    left = layer.to(torch.float32).flatten(1).amax(1)
    assert left.tolist() == [1.0] * 4 + [0.0] * 4 + [1.0] * 3


def test_a_draft_model_is_refused(vault: Vault) -> None:
    problem = Sealing(vault.cache, speculative=True).problem
    assert problem is not None and "--speculative-algorithm" in problem

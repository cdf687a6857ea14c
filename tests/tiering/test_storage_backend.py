"""The store behind SGLang's own host pools, called as HiCache calls it."""

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host import base, common
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory

from sglang_ext.errors import KeyRingError, StoreError, UnsupportedError
from sglang_ext.tiering.storage_backend import ExtStorage
from sglang_ext.types import PUBLIC, Owner
from tests.tiering.stores import ALICE, BOB, MASTER

PAGE_TOKENS = 16
TOKENS = 256


@pytest.fixture(autouse=True)
def _plain_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 0)

    def allocate(dims: Any, dtype: torch.dtype, **_: Any) -> torch.Tensor:
        return torch.zeros(dims, dtype=dtype)

    monkeypatch.setitem(common.ALLOC_MEMORY_FUNCS, "cpu", allocate)


def make_pool(dtype: torch.dtype = torch.bfloat16, layout: str = "layer_first") -> Any:
    device = MHATokenToKVPool(
        size=TOKENS,
        page_size=PAGE_TOKENS,
        dtype=dtype,
        head_num=2,
        head_dim=8,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
    )
    pool = MHATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        1.0,
        0,
        PAGE_TOKENS,
        layout,
        pin_memory=False,
        device_capacity_tokens=TOKENS,
        start_layer=0,
        end_layer=2,
    )
    noise = torch.randint(0, 256, pool.kv_buffer.view(torch.uint8).shape, dtype=torch.uint8)
    pool.kv_buffer.view(torch.uint8).copy_(noise)
    return pool


def make_config(folder: Path, **changes: Any) -> HiCacheStorageConfig:
    extra = {
        "backend_name": "sglang_ext",
        "module_path": "sglang_ext.tiering.storage_backend",
        "class_name": "ExtStorage",
        "interface_v1": 1,
        "folder": str(folder),
        "total_bytes": 2**24,
        "weights_hash": "w",
        "depth": 2,
        **changes.pop("extra", {}),
    }
    fields: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": False,
        "model_name": "model",
    }
    return HiCacheStorageConfig(**{**fields, **changes}, extra_config=extra)


def make_storage(folder: Path, pool: Any, **changes: Any) -> ExtStorage:
    """Build it as SGLang does, by name."""
    storage = StorageBackendFactory.create_backend("dynamic", make_config(folder, **changes), pool)
    assert isinstance(storage, ExtStorage)
    storage.register_mem_pool_host(pool)
    return storage


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[ExtStorage]:
    storage = make_storage(tmp_path, make_pool())
    yield storage
    storage.close()


def keys_of(*numbers: int) -> list[str]:
    return [sha256(b"%d" % number).hexdigest() for number in numbers]


def indices(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(PAGE_TOKENS) + page * PAGE_TOKENS for page in pages])


def content(pool: Any, page: int) -> torch.Tensor:
    flat: torch.Tensor = pool.get_data_page(page * PAGE_TOKENS).view(torch.uint8).clone()
    return flat


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_pages_come_back_to_other_places_bit_for_bit(
    tmp_path: Path, dtype: torch.dtype, layout: str
) -> None:
    pool = make_pool(dtype, layout)
    storage = make_storage(tmp_path, pool)
    keys = keys_of(1, 2, 3)
    before = [content(pool, page) for page in (0, 1, 2)]
    untouched = content(pool, 7)
    storage.note_owner(keys, ALICE)
    assert storage.batch_set_v1(keys, indices(0, 1, 2)) == [True] * 3
    assert storage.batch_exists(keys) == 3
    assert storage.batch_get_v1(keys, indices(4, 5, 6)) == [True] * 3
    for page, expected in zip((4, 5, 6), before, strict=True):
        assert torch.equal(content(pool, page), expected)
    assert torch.equal(content(pool, 7), untouched)
    storage.close()


def test_the_generic_calls_move_flat_pages(storage: ExtStorage) -> None:
    pool = storage.mem_pool_host
    keys = keys_of(1, 2)
    storage.note_owner(keys, ALICE)
    values = [pool.get_data_page(page * PAGE_TOKENS) for page in (0, 1)]
    assert storage.batch_set(keys, values)
    targets = [pool.get_dummy_flat_data_page() for _ in range(3)]
    found = storage.batch_get([*keys, *keys_of(9)], targets)
    assert found[2] is None
    for page, value in zip(found, values, strict=False):
        assert page is not None
        assert torch.equal(page.view(torch.uint8), value.view(torch.uint8))
    assert storage.exists(keys[0])
    assert storage.get(keys_of(9)[0]) is None
    assert not storage.set(keys_of(9)[0], values[0]), "nobody said whose it is"


def test_exists_counts_up_to_the_first_gap(storage: ExtStorage) -> None:
    storage.note_owner(keys_of(1, 2, 3, 4), ALICE)
    storage.batch_set_v1(keys_of(1, 2, 4), indices(0, 1, 2))
    assert storage.batch_exists(keys_of(1, 2, 3, 4)) == 2
    assert storage.batch_exists(keys_of(9, 1)) == 0
    assert storage.batch_exists(keys_of(1, 9, 2)) == 1


def test_a_page_of_no_known_owner_is_not_written(storage: ExtStorage) -> None:
    storage.note_owner(keys_of(2), ALICE)
    assert storage.batch_set_v1(keys_of(1, 2, 3), indices(0, 1, 2)) == [False, True, False]


def test_owners_are_found_again_after_a_restart(tmp_path: Path) -> None:
    pool = make_pool()
    storage = make_storage(tmp_path, pool)
    for number, owner in enumerate([PUBLIC, ALICE, BOB]):
        storage.note_owner(keys_of(number), owner)
    storage.batch_set_v1(keys_of(0, 1, 2), indices(0, 1, 2))
    storage.close()
    storage = make_storage(tmp_path, pool)
    assert storage.batch_exists(keys_of(0, 1, 2)) == 3
    assert storage.batch_get_v1(keys_of(0, 1, 2, 3), indices(3, 4, 5, 6)) == [True] * 3 + [False]
    assert torch.equal(content(pool, 5), content(pool, 2))
    storage.close()


@pytest.mark.trial(63)
def test_a_noted_owner_never_reads_the_page_of_another(storage: ExtStorage) -> None:
    storage.note_owner(keys_of(1), ALICE)
    storage.batch_set_v1(keys_of(1), indices(0))
    storage.note_owner(keys_of(1), BOB)
    assert storage.batch_exists(keys_of(1)) == 0
    assert storage.batch_get_v1(keys_of(1), indices(1)) == [False]


def test_clear_deletes_everything(storage: ExtStorage) -> None:
    storage.note_owner(keys_of(1), ALICE)
    storage.batch_set_v1(keys_of(1), indices(0))
    storage.clear()
    assert storage.batch_exists(keys_of(1)) == 0
    assert storage.store.total_usage().owners == {}


@pytest.mark.trial(18)
@pytest.mark.trial(48)
@pytest.mark.trial(49)
@pytest.mark.trial(66)
@pytest.mark.parametrize(
    ("dtype", "layout", "changes"),
    [
        (torch.float8_e4m3fn, "layer_first", {}),
        (torch.bfloat16, "page_first", {}),
        (torch.bfloat16, "layer_first", {"model_name": "other"}),
        (torch.bfloat16, "layer_first", {"extra": {"weights_hash": "other"}}),
        (torch.bfloat16, "layer_first", {"extra": {"scales": "other"}}),
    ],
)
def test_another_engine_on_the_folder_finds_nothing(
    tmp_path: Path, dtype: torch.dtype, layout: str, changes: dict[str, Any]
) -> None:
    storage = make_storage(tmp_path, make_pool())
    storage.note_owner(keys_of(1), ALICE)
    storage.batch_set_v1(keys_of(1), indices(0))
    storage.close()
    other = make_storage(tmp_path, make_pool(dtype, layout), **changes)
    assert other.batch_exists(keys_of(1)) == 0
    assert other.batch_get_v1(keys_of(1), indices(1)) == [False]
    other.close()


KEYED = {"extra": {"master_key": "env:MASTER"}}


@pytest.fixture
def _master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER", MASTER.hex())


def on_disk(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def start_of(pool: Any, page: int) -> bytes:
    found: bytes = content(pool, page).numpy().tobytes()[:32]
    return found


def test_encryption_needs_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = make_storage(tmp_path, make_pool())
    with pytest.raises(StoreError, match="need a master_key"):
        storage.encrypt([ALICE])
    storage.encrypt([])
    storage.close()
    monkeypatch.delenv("MASTER", raising=False)
    with pytest.raises(KeyRingError, match="not set"):
        make_storage(tmp_path, make_pool(), **KEYED)


@pytest.mark.trial(72)
@pytest.mark.usefixtures("_master")
def test_only_who_asks_for_it_is_encrypted(tmp_path: Path) -> None:
    pool = make_pool()
    storage = make_storage(tmp_path, pool, **KEYED)
    storage.encrypt([ALICE])
    for number, owner in enumerate([ALICE, BOB]):
        storage.note_owner(keys_of(number), owner)
    assert all(storage.batch_set_v1(keys_of(0, 1), indices(0, 1)))
    assert all(storage.batch_get_v1(keys_of(0, 1), indices(2, 3)))
    assert torch.equal(content(pool, 2), content(pool, 0))
    storage.close()
    stored = on_disk(tmp_path)
    for number, clear in enumerate([False, True]):
        assert (start_of(pool, number) in stored) == clear
        assert (bytes.fromhex(keys_of(number)[0]) in stored) == clear


@pytest.mark.trial(72)
@pytest.mark.usefixtures("_master")
def test_a_deleted_owner_has_another_key_and_copies_of_its_pages_are_worthless(
    tmp_path: Path,
) -> None:
    pool = make_pool()
    storage = make_storage(tmp_path, pool, **KEYED)
    storage.encrypt([ALICE])
    storage.note_owner(keys_of(1), ALICE)
    storage.batch_set_v1(keys_of(1), indices(0))
    (slab,) = tmp_path.rglob("*.slab")
    copy = slab.read_bytes()
    assert storage.delete_owner(ALICE) > 0
    storage.note_owner(keys_of(2), ALICE)
    assert storage.batch_set_v1(keys_of(2), indices(1)) == [True]
    storage.close()
    slab.write_bytes(copy)
    for index in tmp_path.rglob("index.sqlite*"):
        index.unlink()
    storage = make_storage(tmp_path, pool, **KEYED)
    storage.encrypt([ALICE])
    storage.note_owner(keys_of(1), ALICE)
    assert storage.batch_get_v1(keys_of(1), indices(2)) == [False]
    storage.close()


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.usefixtures("_master")
def test_what_lies_in_the_other_form_goes_when_the_policy_changes(
    tmp_path: Path, first: bool, restart: bool
) -> None:
    pool = make_pool()
    storage = make_storage(tmp_path, pool, **KEYED)
    storage.encrypt([ALICE] if first else [])
    for number, owner in enumerate([ALICE, BOB]):
        storage.note_owner(keys_of(number), owner)
    storage.batch_set_v1(keys_of(0, 1), indices(0, 1))
    if restart:
        storage.close()
        storage = make_storage(tmp_path, pool, **KEYED)
    storage.encrypt([] if first else [ALICE])
    assert storage.store.owners() == [BOB]
    assert start_of(pool, 0) not in on_disk(tmp_path)
    storage.note_owner(keys_of(0), ALICE)
    assert storage.batch_set_v1(keys_of(0), indices(0)) == [True]
    assert (start_of(pool, 0) in on_disk(tmp_path)) == first
    assert storage.batch_get_v1(keys_of(0, 1), indices(2, 3)) == [True, True]
    storage.encrypt([] if first else [ALICE])
    assert storage.batch_exists(keys_of(0, 1)) == 2, "said again, it changes nothing"
    storage.close()


def test_what_cannot_work_is_refused_with_a_reason(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    assert config.extra_config is not None
    del config.extra_config["weights_hash"]
    with pytest.raises(StoreError, match="'weights_hash' is missing"):
        ExtStorage(config, {})
    with pytest.raises(UnsupportedError, match="MLA"):
        ExtStorage(make_config(tmp_path, is_mla_model=True, tp_size=2), {})


def test_old_notes_are_forgotten(storage: ExtStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_ext.tiering.storage_backend._NOTES", 2)
    storage.note_owner(keys_of(1, 2, 3), Owner("t:x"))
    assert storage.batch_set_v1(keys_of(1, 2, 3), indices(0, 1, 2)) == [False, True, True]

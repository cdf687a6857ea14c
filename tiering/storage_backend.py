"""The NVMe and remote stores as SGLang's HiCache sees them (``--hicache-storage-backend dynamic``).

    --hicache-storage-backend-extra-config '{
        "backend_name": "sglang_ext", "module_path": "sglang_ext.tiering.storage_backend",
        "class_name": "ExtStorage", "interface_v1": 1,
        "folder": "/var/lib/sglang-ext", "total_bytes": 2000000000000, "weights_hash": "..."}'

Optional: ``kv_dtype`` and ``scales`` (what the pool's tensor type does not tell), ``depth``,
``timeout_s``, ``master_key`` (a file, or env:NAME), without which nothing can be encrypted, and
``remote``, a store that other machines share (see ``remote_open``).

SGLang names pages by a hash and says no owner. The cache tells it first through ``note_owner``. A
page without an owner is never written; to be read, it is looked for among the owners that are here.
What is not on this machine's disk is asked of the remote store.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
)

from sglang_ext.errors import StoreError, UnsupportedError
from sglang_ext.namespace import is_sealed
from sglang_ext.tiering.caps import Caps
from sglang_ext.tiering.encryption import KeyRing, master_key
from sglang_ext.tiering.nvme_store import NvmeStore, StoreConfig
from sglang_ext.tiering.page_format import Fingerprint
from sglang_ext.tiering.page_store import LocalFirst
from sglang_ext.tiering.remote_open import open_remote
from sglang_ext.tiering.remote_store import RemoteStore
from sglang_ext.tiering.transfers import PageRef, bytes_on_disk
from sglang_ext.types import Owner

__all__ = ["ExtStorage"]

logger = logging.getLogger(__name__)

_NOTES = 2**18
"""Owners of so many hashes are remembered: those on their way between the cache and the store."""


class ExtStorage(HiCacheStorage):
    """Pages of one rank. Every answer about a page is a value; only setting up raises."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any]) -> None:
        """Remember the configuration; the folder is opened when the host pool is known."""
        if storage_config.is_mla_model and storage_config.tp_size > 1:
            raise UnsupportedError(
                "NVMe tier: SGLang writes the pages of an MLA model from one rank only, and ranks"
                " do not share a folder; use --tp 1, or no NVMe tier"
            )
        self._ranks = storage_config
        self._extra: dict[str, Any] = dict(storage_config.extra_config or {})
        for name in ("folder", "total_bytes", "weights_hash"):
            if name not in self._extra:
                raise StoreError(f"NVMe tier: {name!r} is missing in the storage backend's config")
        self._owners: OrderedDict[str, Owner] = OrderedDict()
        self._owners_lock = threading.Lock()
        self._encrypted: frozenset[Owner] = frozenset()
        self._keys: KeyRing | None = None
        self._store: NvmeStore | None = None
        self.remote: RemoteStore | None = None
        """The store that other machines share; needs the host pool."""
        self.copies: Callable[[Owner], bool] = lambda owner: False
        """Tells whose pages are copied to the remote store."""
        self.remote_lifetime_s: Callable[[Owner], float] = lambda owner: 0.0
        """Tells for how long after it was written a page of the remote store is good."""
        self.before_sealed_read: Callable[[torch.Tensor], None] = lambda slots: None
        """Called with the slots of the host pool that are about to get pages of sealed owners."""

    @property
    def store(self) -> NvmeStore:
        """The store behind it, for caps, usage, counters, deletion; needs the host pool."""
        assert self._store is not None, "register_mem_pool_host comes first"
        return self._store

    @property
    def bytes_per_token(self) -> int:
        """What a token takes on disk, its part of header and rounding included."""
        return -(-bytes_on_disk(self._page_bytes) // self.mem_pool_host.page_size)

    def note_owner(self, hashes: Iterable[str], owner: Owner) -> None:
        """Tell whose pages these are, before they are written or looked for. O(hashes)."""
        with self._owners_lock:
            for name in hashes:
                self._owners[name] = owner
                self._owners.move_to_end(name)
            while len(self._owners) > _NOTES:
                self._owners.popitem(last=False)

    def encrypt(self, owners: Iterable[Owner]) -> None:
        """Encrypt the pages of exactly these owners from now on.

        What an owner has in the other form, from before a restart or a change of the policy, is
        deleted: an owner has a key exactly while its pages are encrypted. O(owners + deleted).
        Raises StoreError where there is no master key.
        """
        wanted = frozenset(owners)
        if self._keys is None and wanted:
            raise StoreError("NVMe tier: encrypted pages need a master_key in the config")
        changed, self._encrypted = wanted != self._encrypted, wanted
        if self.remote is not None:
            self.remote.start(changed)
        if self._keys is None:
            return
        for owner in {*wanted, *self.store.owners()}:
            if self._keys.holds(owner) != (owner in wanted):
                self.delete_owner(owner)
        for owner in wanted:
            self._keys.find_or_make(owner)

    def delete_owner(self, owner: Owner) -> int:
        """Delete every page of ``owner`` here, also those on their way; return the bytes freed.

        Its key goes first, so that no copy of its encrypted pages can ever be read; the next page
        gets a new one. O(pages of the owner, notes).
        """
        with self._owners_lock:
            for name in [name for name, noted in self._owners.items() if noted == owner]:
                del self._owners[name]
        self._destroy_key(owner)
        return self.store.delete_owner(owner)

    def _destroy_key(self, owner: Owner) -> None:
        if self._keys is None:
            return
        try:
            self._keys.destroy(owner)
        except OSError as error:
            logger.warning("cannot destroy the key of %s: %s", owner, error)

    def delete_pages(self, owner: Owner, hashes: Sequence[str]) -> int:
        """Delete these pages of ``owner``, also on their way here; return the bytes freed."""
        with self._owners_lock:
            for name in hashes:
                if self._owners.get(name) == owner:
                    del self._owners[name]
        refs = [PageRef(owner, bytes.fromhex(name)) for name in hashes]
        if self.remote is not None and refs and self.copies(owner):
            self.remote.delete_soon(refs)
        return self.store.delete(refs)

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the folder for pages of this pool. Raises StoreError, KeyRingError."""
        super().register_mem_pool_host(mem_pool_host)
        try:
            page = mem_pool_host.get_data_page(0, flat=False)
        except NotImplementedError as error:
            raise UnsupportedError(f"NVMe tier: {type(mem_pool_host).__name__}: {error}") from error
        self._page_bytes = page.numel() * page.element_size()
        self.config = self._store_config(page)
        master = None
        if "master_key" in self._extra:
            master = master_key(self._extra["master_key"])
            self._keys = KeyRing(self.config.folder / "keys", master)
        self._store = NvmeStore(self.config, self._keys)
        if "remote" in self._extra:
            self.remote = open_remote(
                self._extra["remote"],
                self.config,
                self._page_bytes,
                master,
                lambda owner: self.copies(owner),
                lambda owner: self.remote_lifetime_s(owner),
            )
        self._pages = LocalFirst(self._store, self.remote)

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """Count the pages that are there, up to the first that is not."""
        refs = self._refs(keys)
        known = list(takewhile(lambda ref: ref is not None, refs))
        found = self._pages.contains_batch([ref for ref in known if ref is not None])
        return next((place for place, there in enumerate(found) if not there), len(known))

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Read pages into the host pool; False for each that must be computed instead."""
        return self._read(keys, self._pool_pages(host_indices), host_indices)

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Write pages of the host pool; False for each that was refused."""
        return self._write(keys, self._pool_pages(host_indices))

    def get(
        self, key: str, target_location: Any | None = None, target_sizes: Any | None = None
    ) -> torch.Tensor | None:
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(
        self,
        keys: list[str],
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> list[torch.Tensor | None]:
        """Read pages into flat tensors, new ones where none are given; None for a miss."""
        if target_locations is None:
            target_locations = [self.mem_pool_host.get_dummy_flat_data_page() for _ in keys]
        found = self._read(keys, target_locations)
        return [page if hit else None for page, hit in zip(target_locations, found, strict=True)]

    def set(
        self,
        key: str,
        value: Any | None = None,
        target_location: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any | None = None,
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Write flat pages; False when any of them was refused."""
        return all(self._write(keys, values or []))

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def clear(self) -> None:
        """Delete every page of every owner on this machine."""
        for owner in self.store.owners():
            self.store.delete_owner(owner)

    def close(self) -> None:
        """Save the index, free the folder, and let go of the remote store."""
        if self._store is not None:
            self._store.close()
        if self.remote is not None:
            self.remote.close()

    def _read(
        self, keys: list[str], pages: Sequence[torch.Tensor], slots: torch.Tensor | None = None
    ) -> list[bool]:
        refs = self._refs(keys)
        if slots is not None and any(ref is not None and is_sealed(ref.owner) for ref in refs):
            self.before_sealed_read(slots)
        places = [place for place, ref in enumerate(refs) if ref is not None]

        def deliver(index: int, body: memoryview) -> None:
            page = _as_bytes(pages[places[index]])
            np.copyto(page, _like(body, page))

        wanted = [ref for ref in refs if ref is not None]
        return _spread(len(keys), places, self._pages.get_batch(wanted, deliver))

    def _write(self, keys: list[str], pages: Sequence[torch.Tensor]) -> list[bool]:
        with self._owners_lock:
            owners = [self._writer(self._owners.get(key)) for key in keys]
        places = [place for place, owner in enumerate(owners) if owner is not None]

        def fill(index: int, body: memoryview) -> None:
            page = _as_bytes(pages[places[index]])
            np.copyto(_like(body, page), page)

        refs = [
            PageRef(owner, bytes.fromhex(key))
            for owner, key in zip(owners, keys, strict=True)
            if owner is not None
        ]
        stored = self._pages.put_batch(refs, [self._page_bytes] * len(refs), fill)
        return _spread(len(keys), places, stored)

    def _writer(self, owner: Owner | None) -> Owner | None:
        """Return who may write: a sealed owner that left the policy has no key, and never does."""
        if owner is not None and is_sealed(owner) and owner not in self._encrypted:
            return None
        return owner

    def _refs(self, keys: list[str]) -> list[PageRef | None]:
        """Return whose pages these are; None where no owner here has such a page."""
        with self._owners_lock:
            owners = [self._owners.get(key) for key in keys]
        candidates = self.store.owners() if None in owners else []
        refs: list[PageRef | None] = []
        for key, owner in zip(keys, owners, strict=True):
            name = bytes.fromhex(key)
            if owner is None:
                owner = self.store.find_owner(name, candidates)
                # The next page of the path most likely belongs to the same owner.
                candidates.sort(key=lambda candidate: candidate != owner)
            refs.append(None if owner is None else PageRef(owner, name))
        return refs

    def _pool_pages(self, host_indices: torch.Tensor) -> list[torch.Tensor]:
        pool = self.mem_pool_host
        starts = host_indices.tolist()[:: pool.page_size]
        return [pool.get_data_page(start, flat=False) for start in starts]

    def _store_config(self, page: torch.Tensor) -> StoreConfig:
        config, extra, pool = self._ranks, self._extra, self.mem_pool_host
        rank = f"tp{config.tp_rank}of{config.tp_size}-pp{config.pp_rank}of{config.pp_size}"
        return StoreConfig(
            folder=Path(extra["folder"]) / f"{rank}-dp{config.dp_rank}",
            fingerprint=Fingerprint(
                model_id=str(config.model_name),
                weights_hash=str(extra["weights_hash"]),
                kv_dtype=f"{extra.get('kv_dtype', 'auto')} in {pool.dtype}",
                scales=str(extra.get("scales", "")),
                layout=f"{pool.layout} {tuple(page.shape)}",
                page_size=pool.page_size,
                tp_rank=config.tp_rank,
                tp_size=config.tp_size,
                pp_rank=config.pp_rank,
                pp_size=config.pp_size,
            ),
            caps=Caps(total_bytes=int(extra["total_bytes"])),
            depth=extra.get("depth"),
            timeout_s=float(extra.get("timeout_s", 5.0)),
            encrypted=lambda owner: owner in self._encrypted,
        )


def _as_bytes(page: torch.Tensor) -> np.ndarray:
    # NumPy copies in the calling thread; torch would start threads of its own beside the workers.
    view: np.ndarray = page.view(torch.uint8).numpy()
    return view


def _like(body: memoryview, page: np.ndarray) -> np.ndarray:
    return np.frombuffer(body, dtype=np.uint8).reshape(page.shape)


def _spread(count: int, places: Sequence[int], values: Sequence[bool]) -> list[bool]:
    result = [False] * count
    for place, value in zip(places, values, strict=True):
        result[place] = value
    return result

"""The lower tiers of one cache, once model and pools are known.

before the cache is built   complete_storage_config   folder, size and fingerprint of our store
once it is built            TenantStore               caps and owners, what it holds, deletion
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sglang.srt.runtime_context import get_context, get_memory

from sglang_ext.errors import UnsupportedError
from sglang_ext.remote_tier import RemoteShare, limits_in_bytes, remote_config
from sglang_ext.tenancy.policy import Policy, TtlSince
from sglang_ext.tenancy.quota import QuotaBook
from sglang_ext.tier_flags import STORAGE_CONFIG, ranks
from sglang_ext.tiering.caps import Caps, Limit
from sglang_ext.tiering.scales_in_force import scales_digest
from sglang_ext.tiering.storage_backend import ExtStorage
from sglang_ext.tiering.transfers import PageRef
from sglang_ext.types import Owner, OwnerLimits, Tier
from sglang_ext.weights import kv_scales, lasting_adapters, weights_hash

__all__ = ["TenantStore", "complete_storage_config", "tenant_store"]

logger = logging.getLogger(__name__)


def complete_storage_config(ctx: Any, policy: Policy) -> None:
    """Tell our store where its pages lie, how much it may take and which pages are valid.

    ``ctx`` is SGLang's TreeCacheBuildContext. Fields that the command line sets win. Another
    backend, or none, is left alone.
    """
    memory, nvme = get_memory(), policy.tiers.nvme
    text = memory.hicache_storage_backend_extra_config or ""
    if memory.hicache_storage_backend != "dynamic" or nvme is None or text.startswith("@"):
        return
    given = json.loads(text)
    if given.get("class_name") != STORAGE_CONFIG["class_name"]:
        return
    runner = ctx.tp_worker.model_runner
    config = {
        "folder": str(nvme.path),
        "total_bytes": int(nvme.size.amount) // ranks(ctx.server_args),
        "weights_hash": _weights(ctx),
        "kv_dtype": str(ctx.params.token_to_kv_pool_allocator.get_kvcache().dtype),
        "scales": kv_scales(runner.model) + scales_digest(),
        # What is worth a fetch is measured (``sglang_ext.fetching``), not fixed here.
        "prefetch_threshold": int(ctx.params.page_size),
        **({} if nvme.master_key is None else {"master_key": nvme.master_key}),
        **({} if policy.tiers.remote is None else {"remote": remote_config(policy.tiers.remote)}),
        **given,
    }
    fields = {"hicache_storage_backend_extra_config": json.dumps(config)}
    get_context().override("sglang_ext.tiers", **fields)


def tenant_store(ctx: Any, cache: Any, policy: Policy) -> "TenantStore | None":
    """Return the NVMe tier of a cache that was just built, with its caps set; None without one.

    Raises UnsupportedError for a model of which the store would keep only a part, and PolicyError
    where quotas or reserves do not fit.
    """
    controller = cache.cache_controller
    backend = None if controller is None else controller.storage_backend
    if not isinstance(backend, ExtStorage):
        return None
    if len(cache.tree_components) > 1 or cache.sidecar_pool_specs:
        raise UnsupportedError(
            "tiers.nvme does not work with this model yet: it keeps a window, a state or an index "
            "besides full attention, which the store does not hold; remove tiers.nvme"
        )
    return TenantStore(backend, policy, lambda: _weights(ctx))


def _weights(ctx: Any) -> str:
    runner = ctx.tp_worker.model_runner
    adapters = lasting_adapters(runner.lora_manager)
    return weights_hash(runner.model, ctx.model_config.hf_config, adapters)


class TenantStore:
    """The NVMe tier of one rank: an ExtStorage under the policy's quotas.

    ``remote`` is the tier below it, None without one. What is deleted here goes there too.
    """

    def __init__(self, backend: ExtStorage, policy: Policy, weights: Callable[[], str]) -> None:
        self.backend = backend
        self.bytes_per_token = backend.bytes_per_token
        self._weights = weights
        self._total = backend.config.caps.total_bytes
        self.remote = None if backend.remote is None else RemoteShare(backend)
        self.use(policy, self.book(policy))

    def book(self, policy: Policy) -> QuotaBook:
        """Return what owners may hold here; raises PolicyError where the policy does not fit."""
        if self.remote is not None:
            self.remote.book(policy)
        tokens = self._total // self.bytes_per_token
        return QuotaBook(policy, Tier.NVME, tokens, self.bytes_per_token)

    def use(self, policy: Policy, book: QuotaBook) -> None:
        """Let these limits hold from now on; what is above a hard one leaves at once."""
        self._book = book
        caps = Caps(
            total_bytes=self._total,
            limits=limits_in_bytes(book, self.bytes_per_token),
            # Who is no longer in the policy file gives first.
            default=Limit(quota_bytes=0),
        )
        self.backend.store.set_caps(caps)
        if self.remote is not None:
            self.remote.use(policy)
        self.backend.encrypt(policy.encrypted_owners)
        self.backend.store.keep_age(
            tenant.owner
            for tenant in policy.tenants.values()
            if tenant.ttl.since is TtlSince.CREATED
        )

    def limits(self, owner: Owner) -> OwnerLimits:
        """Return what ``owner`` may hold here, in tokens."""
        return self._book.limits(owner)

    def note_owner(self, hashes: Iterable[str], owner: Owner) -> None:
        """Tell whose pages are about to be written. O(pages)."""
        self.backend.note_owner(hashes, owner)

    def held_bytes(self) -> Mapping[Owner, int]:
        """Return the bytes on disk by owner, headers included. O(owners)."""
        return self.backend.store.total_usage().owners

    def counters(self) -> Mapping[str, int]:
        """Return what happened since the start, by name."""
        below = {} if self.remote is None else self.remote.counters()
        return {**self.backend.store.counters, **below}

    def owners(self) -> list[Owner]:
        """Return who holds a page here or below. O(owners)."""
        below = () if self.remote is None else self.remote.held_bytes()
        return list(dict.fromkeys([*self.backend.store.owners(), *below]))

    def rows(self, owner: Owner) -> Iterator[tuple[Tier, int, OwnerLimits]]:
        """Yield what ``owner`` holds, in tokens, and may hold, by tier."""
        yield Tier.NVME, self.held_bytes().get(owner, 0) // self.bytes_per_token, self.limits(owner)
        if self.remote is not None:
            tokens = self.remote.usage(owner) // self.remote.bytes_per_token
            yield Tier.REMOTE, tokens, self.remote.limits(owner)

    def expire(self, owner: Owner, before: float) -> int:
        """Delete pages of ``owner`` last used here before that time; return the bytes freed."""
        return self.backend.store.expire(owner, before)

    def delete_owner(self, owner: Owner) -> int:
        """Delete every page of ``owner`` on this machine; return the bytes freed. O(pages)."""
        return self.backend.delete_owner(owner)

    def left(self, owner: Owner) -> dict[str, int]:
        """Return the bytes of ``owner`` here and below, as answers name them."""
        here = {"nvme_bytes": self.held_bytes().get(owner, 0)}
        if self.remote is None:
            return here
        return {**here, "remote_bytes": self.remote.usage(owner)}

    def delete_owner_below(self, owner: Owner) -> int | None:
        """Delete every page of ``owner`` on all machines; return the bytes freed, None without."""
        return None if self.remote is None else self.remote.delete_owner(owner)

    def deleted_elsewhere(self) -> list[Owner]:
        """Return whose pages another machine deleted since the last call.

        Those of them that lie on this disk, and were not used since then, are deleted first. O(1)
        where there are none.
        """
        news = () if self.backend.remote is None else self.backend.remote.notices.news
        owners: list[Owner] = []
        while news:
            notice = news.popleft()
            self.backend.store.expire(notice.owner, notice.time)
            owners.append(notice.owner)
        return owners

    def delete_pages(self, owner: Owner, hashes: Sequence[str]) -> int:
        """Delete some pages of ``owner``; return the bytes freed. O(pages)."""
        return self.backend.delete_pages(owner, hashes)

    def holds(self, owner: Owner, hashes: Sequence[str]) -> list[bool]:
        """Tell which pages of ``owner`` are here, from memory alone. O(pages)."""
        refs = [PageRef(owner, bytes.fromhex(name)) for name in hashes]
        return self.backend.store.contains_batch(refs)

    def written(self, owner: Owner, page: str) -> float | None:
        """Return when a page of an owner with a fixed lifetime came here; None if it did not."""
        return self.backend.store.last_access(PageRef(owner, bytes.fromhex(page)))

    def weights_changed(self, flushed: bool) -> None:
        """Serve nothing that former weights computed.

        ``flushed``: no page of theirs is left above or on its way down. Otherwise nothing is read
        or written from here until the server starts again.
        """
        if not flushed:
            logger.warning("weights changed without a flush: the NVMe tier is off until a restart")
            self.backend.close()
            return
        fingerprint = replace(self.backend.config.fingerprint, weights_hash=self._weights())
        self.backend.store.rebind(fingerprint)
        if self.backend.remote is not None:
            self.backend.remote.rebind(fingerprint)

"""The cache that the scheduler talks to: SGLang's, over a tree that knows tenants."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import DriveHostEvictionResult
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.utils.rank_consensus_checker import rank_consensus

from sglang_ext.fetching import FetchingCache
from sglang_ext.lifespans import Lifespans
from sglang_ext.namespace import is_sealed, parse
from sglang_ext.pins import PinAnswer, Pins
from sglang_ext.quotas import Quotas
from sglang_ext.radix.clock import SharedClock
from sglang_ext.radix.deadlines import Deadlines
from sglang_ext.radix.host_copies import free_host_leaf
from sglang_ext.radix.ledger import Ledger
from sglang_ext.radix.order import Reason
from sglang_ext.radix.public import PublicPrefixes
from sglang_ext.radix.sessions import SessionId, Sessions
from sglang_ext.radix.victims import Eviction
from sglang_ext.removal import Flushed
from sglang_ext.request_tag import NO_TAG, RequestTag
from sglang_ext.residency import Residency
from sglang_ext.sealing import Sealing
from sglang_ext.tenancy.identity import tenant_of_id
from sglang_ext.tenancy.quota import QuotaBook
from sglang_ext.tiering.token_time import TokenTime
from sglang_ext.tiers import TenantStore
from sglang_ext.types import Owner, OwnerLimits, Tier

__all__ = ["Flushed", "TenantRadixCache"]


class TenantRadixCache(FetchingCache):
    """SGLang's prefix cache with one tree for all tenants, in which none sees another's nodes.

    ``tick`` must be called once per scheduler step, on every rank equally often.
    """

    tree_core: Any
    store: TenantStore | None = None
    """The NVMe tier, once there is one."""
    residency: Residency | None = None
    """What moves pages down as they age; None: they leave only when room is needed."""
    lifespans: Lifespans | None = None
    """What ends pages at a time of their own; None: no request and no policy can give them one."""
    sealing: Sealing | None = None
    """What has pages of sealed owners zeroed; None: there are none."""

    def __init__(self, params: Any, public: PublicPrefixes | None = None) -> None:
        self.pins = Pins(self)
        self.sessions, self.deadlines = Sessions(), Deadlines()
        super().__init__(params)
        self._alone = self.tp_world_size == 1 and self.pp_size == 1
        self.clock = SharedClock(self._agree)
        self.tree_core.clock = self.clock
        self.tree_core.sessions, self.tree_core.deadlines = self.sessions, self.deadlines
        self.ledger: Ledger = self.tree_core.ledger
        self.ledger.bytes_per_token = _bytes_per_token(params.token_to_kv_pool_allocator)
        self.token_time = TokenTime()
        self._quotas = Quotas(self)
        if public is not None:
            self.tree_core.public = public

    def tick(self) -> int:
        """Advance the shared clock and return it in milliseconds. One all-reduce, none alone.

        Pins whose time has come end here, hard quotas are enforced and pages age, with or without
        traffic.
        """
        self.token_time.settle(self.ledger.changed, self.ledger.tokens, self.clock.now_ms)
        self.ledger.changed.clear()
        now_ms = self.clock.tick()
        self.pins.expire(now_ms)
        self._quotas.enforce_all()
        if self.residency is not None:
            self.residency.tick(now_ms)
        if self.lifespans is not None:
            self.lifespans.tick(now_ms)
        self._follow_deletions()
        return now_ms

    # ---- who may have how much

    def limit(self, books: Iterable[QuotaBook]) -> None:
        """Let these quota books decide from now on, one for each tier that they limit.

        Raises UnsupportedError for a model whose caches quotas cannot follow. O(owners).
        """
        self._quotas = Quotas(self, books)

    def owner_of(self, req: Any) -> Owner:
        """Return who owns what a request computes."""
        return parse(req.extra_key).owner

    def limits(self, owner: Owner, tier: Tier = Tier.HBM) -> OwnerLimits:
        """Return what ``owner`` may hold in ``tier``."""
        return self._quotas.limits(owner, tier)

    @contextmanager
    def as_requester(
        self, owners: Iterable[Owner], incoming: Mapping[Owner, int] | None = None
    ) -> Iterator[None]:
        """Within, sizes and victims are those of a request, or batch, of ``owners``.

        They may roll over their own reserves; without it every reserve is kept. To be set around
        the admission of one request (its owner) and around an allocation for a batch (all owners in
        it): ``radix.shares`` says why what the former promised the latter gets.

        ``incoming`` says how many tokens each gets within; only for an allocation. They count as
        held when victims are chosen (without it, one large allocation could take from owners below
        their share), hard quotas make room for them first, and they count as running afterwards.
        """
        incoming = incoming or {}
        for owner, tokens in incoming.items():
            self.enforce_hard_quota(owner, tokens)
        with self._quotas.requested_by(dict.fromkeys(owners, 0) | dict(incoming), Tier.HBM):
            yield
        for owner, tokens in incoming.items():
            self.ledger.start_running(owner, tokens)

    def evictable_size(self) -> int:
        return super().evictable_size() - self._quotas.withheld()

    def full_evictable_size(self) -> int:
        return super().full_evictable_size() - self._quotas.withheld()

    def protected_size(self) -> int:
        return super().protected_size() + self._quotas.withheld()

    def full_protected_size(self) -> int:
        return super().full_protected_size() + self._quotas.withheld()

    def headroom(self, owner: Owner) -> int:
        """Return how many more tokens ``owner`` may get running now, at least 0. O(1).

        The least of three: what its hard quota leaves above its locked and running tokens; what the
        pool leaves when everybody's locked and running tokens, and the rest of every other owner's
        reserve, are taken out; and what is free or can be freed for it at once. Its own cached
        tokens never count against it: they make room.
        """
        return self._quotas.headroom(owner)

    def fits_ever(self, owner: Owner, tokens: int) -> str | None:
        """Return why a request of ``tokens`` can never be served, None when it can.

        ``tokens`` as admission counts them: prompt, output and what is rounded up.
        """
        most, bound = self._quotas.largest(owner)
        if tokens <= most:
            return None
        return f"the request needs {tokens} tokens of KV cache, expected at most {most} ({bound})"

    def enforce_hard_quota(self, owner: Owner, incoming: int = 0) -> int:
        """Make ``owner`` give its oldest pages until its hard quota holds it and ``incoming``.

        Returns how many tokens are still too many, because they are locked or running.
        """
        return self._quotas.enforce(owner, Tier.HBM, incoming)

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        before = req.kv.cache_protected_len
        super().checkpoint(req, up_to=up_to, **kwargs)
        owner = self.owner_of(req)
        self.ledger.stop_running(owner, req.kv.cache_protected_len - before)
        self._note_request(req, owner)
        self.enforce_hard_quota(owner)

    def _note_request(self, req: Any, owner: Owner) -> None:
        """Let the pages of a request know their session, and when they end. O(1) without either."""
        tag: RequestTag = getattr(req, "kv_tag", NO_TAG)
        if req.skip_radix_cache_insert or self.is_root(req.last_node):
            return
        node = self.tree_core.node_by_id(req.last_node)
        if tag.session:
            id = SessionId(tenant_of_id(req.rid), tag.session)
            self.sessions.use(id, owner, node, self.clock.now_ms)
        if self.lifespans is not None:
            self.lifespans.used(node, owner, tag.ttl_ms)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        left = req.kv.kv_allocated_len - req.kv.cache_protected_len
        self.ledger.stop_running(self.owner_of(req), left)
        # What the request had locked can go only now.
        self.enforce_hard_quota(self.owner_of(req))

    def _execute_kv_backup(
        self, node_id: int, device_value: Any, comp_xfers: Any, sidecar_xfers: Any
    ) -> Any:
        node, tokens = self.tree_core.node_by_id(node_id), len(device_value)
        with self._keeping_copy(node.parent.id):
            if self._quotas.enforce(node.owner, Tier.CPU, tokens):
                return None
            with self._quotas.requested_by({node.owner: tokens}, Tier.CPU):
                slots = super()._execute_kv_backup(node_id, device_value, comp_xfers, sidecar_xfers)
        if self.sealing is not None and is_sealed(node.owner):
            self.sealing.in_cpu(slots)
        return slots

    def load_back(self, node_id: int, mem_quota: int | None = None, req: Any = None) -> bool:
        loaded: bool = super().load_back(node_id, mem_quota, req)
        node = self.tree_core.node_by_id(node_id)
        if loaded and self.sealing is not None and is_sealed(node.owner):
            self.sealing.in_hbm(
                self.tree_core.collect_full_device_indices(node_id, self.root_node_handle())
            )
        return loaded

    @contextmanager
    def _keeping_copy(self, node_id: int) -> Iterator[None]:
        """Within, a node keeps its copy in host memory: room for what continues it is made."""
        lock = self.inc_host_lock_ref(node_id).to_dec_params()
        try:
            yield
        finally:
            self.dec_host_lock_ref(node_id, lock)

    def write_backup_storage(self, node_id: int) -> None:
        node = self.tree_core.node_by_id(node_id)
        if node.lifespan is not None and node.lifespan.ttl_ms is not None:
            return
        if self.store is not None:
            self.store.note_owner(node.hash_value or (), node.owner)
        super().write_backup_storage(node_id)

    def asks_below(self, tokens: Any, plan: Any) -> None:
        """Say whose pages are looked for: of those that other machines wrote nobody here knows."""
        if self.store is not None and self.store.remote is not None:
            key = RadixKey(tokens[: plan.units], plan.extra_key, cache_salt=plan.cache_salt)
            hashes = get_storage_hash_str(key, plan.last_hash, page_size=self.page_size)
            self.store.note_owner(hashes, plan.owner)

    def weights_changed(self, flushed: bool) -> None:
        """Serve nothing from below that former weights computed; see ``TenantStore``."""
        if self.store is not None:
            self.store.weights_changed(flushed)

    # ---- residency

    def copy_down(self, leaf: Any) -> bool:
        """Tell whether a leaf in HBM has its copy in CPU; where not, begin one."""
        if not leaf.backuped:
            self._execute_and_commit_kv_backup(self.tree_core.build_backup_kv_action(leaf.id))
            return False
        return True

    @rank_consensus(same_params=["leaf.id", "tier", "reason"])
    def free_leaf(self, leaf: Any, tier: Tier, reason: Reason) -> bool:
        """Free what an unlocked leaf holds in ``tier``, and count why. O(leaf)."""
        owner, tokens = leaf.owner, len(leaf.key)
        if tier is Tier.HBM:
            self._evict_device_leaf(leaf.id, dict.fromkeys(self.tree_components, 0))
        else:
            result = DriveHostEvictionResult()
            free_host_leaf(
                self.tree_core,
                leaf,
                result.tracker,
                result.device_frees,
                result.host_frees,
                result.cache_actions,
            )
            self._apply_eviction_result(result)
        self.tree_core.victims.left(owner, tier, tokens, reason)
        return True

    def make_room(self, tokens: int) -> None:
        """Take the next victims of HBM ahead of need; reserves are kept."""
        self.evict(EvictParams(num_tokens=tokens))

    def flush(self, owner: Owner) -> Flushed:
        """Remove the pages and pins of ``owner`` from every tier. O(its pages).

        What running requests or copies on their way still hold stays, and is counted; ask again.
        """
        freed, in_use = self._flush_memory(owner)
        if self.store is None:
            return Flushed(freed, in_use)
        disk, below = self.store.delete_owner(owner), self.store.delete_owner_below(owner)
        return Flushed(freed, in_use, disk, below)

    def _follow_deletions(self) -> None:
        """Delete here what another machine deleted for all.

        Several ranks hear of it at different times, and must not free different pages: there only
        the disk follows.
        """
        owners = () if self.store is None else self.store.deleted_elsewhere()
        for owner in owners if self._alone else ():
            self._flush_memory(owner)

    def _flush_memory(self, owner: Owner) -> tuple[dict[Tier, int], dict[Tier, int]]:
        """Remove pages and pins from memory; return the tokens freed and in use, by tier."""
        self.pins.remove_all(owner)
        before = {tier: self.ledger.usage(owner, tier).tokens for tier in (Tier.HBM, Tier.CPU)}
        victims = self.tree_core.victims
        with victims.of(owner, Reason.FLUSH):
            # What leaves HBM needs no copy below: that goes too.
            self.evict(EvictParams(num_tokens=before[Tier.HBM]))
            if self.cache_controller is not None:
                self.evict_host(before[Tier.CPU])
        in_use = {tier: self.ledger.usage(owner, tier).tokens for tier in before}
        freed = {tier: held - in_use[tier] for tier, held in before.items()}
        self.sessions.forget_owner(owner)
        return freed, in_use

    # ---- pins

    def pin_prefix(self, key: RadixKey, owner: Owner, expires_ms: int | None = None) -> PinAnswer:
        """Keep what is cached of ``key`` in HBM until a time on ``clock``, None for ever.

        Pinned pages count against the owner's quota; over budget only what fits is pinned.
        """
        return self.pins.add(key, owner, expires_ms)

    @property
    def evictions(self) -> Mapping[Eviction, int]:
        """Tokens evicted since the start by (owner, tier, reason)."""
        return self.tree_core.victims.evicted

    def reset(self) -> None:
        self.pins.forget()
        super().reset()
        self.sessions.clear()
        self.deadlines.clear()

    def most_of_all_ranks(self, values: list[int]) -> list[int]:
        """Return the greatest value of a rank, place by place. One all-reduce, none alone."""
        if self._alone:
            return values
        numbers = torch.tensor(values, dtype=torch.int64)
        self._all_reduce(numbers, torch.distributed.ReduceOp.MAX)
        return [int(number) for number in numbers.tolist()]

    def _agree(self, now_ms: int) -> int:
        """Return the latest time of all ranks, which also agree on what is worth loading."""
        now, *greatest = self.most_of_all_ranks([now_ms, *self.worth.proposal()])
        self.worth.agree(greatest)
        return now


def _bytes_per_token(allocator: Any) -> int:
    """Return the bytes of one token's KV over all layers of this rank, 0 when unknown."""
    pool = allocator.get_kvcache()
    if not hasattr(pool, "get_kv_size_bytes"):
        return 0
    size = pool.get_kv_size_bytes()
    total = sum(size) if isinstance(size, tuple) else size
    return int(total // (pool.size + pool.page_size))

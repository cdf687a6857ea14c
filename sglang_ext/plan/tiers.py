"""The tiers of a simulated engine together: where a prompt is found, and what is loaded of it."""

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from sglang_ext.namespace import tenant_owner
from sglang_ext.plan.requests import PlanRequest
from sglang_ext.plan.tier import SimulatedTier
from sglang_ext.residency import lifetimes
from sglang_ext.tenancy.policy import Policy
from sglang_ext.tenancy.quota import QuotaBook
from sglang_ext.tiering.placement import Lifetime
from sglang_ext.tiering.worth import Choice, LoadOrCompute
from sglang_ext.types import Owner, TenantId, Tier

__all__ = ["Placed", "Sizes", "TierStack"]

_FETCH_TOKENS = 256
"""From how many tokens on a fetch from the disk pays off before anything was measured."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Tokens that each tier holds, 0 where there is none, and how fast the disk is read."""

    hbm: int
    cpu: int = 0
    nvme: int = 0
    disk_bandwidth: float = 6e9
    disk_latency: float = 200e-6
    kv_bytes: float = 1.0
    block: int = 1
    """Tokens a unit."""


class Placed(NamedTuple):
    """Where a prompt was found in tokens, what of it is loaded, and what ends its stay in HBM."""

    found: dict[Tier, int]
    choice: dict[Tier, int]
    release: Callable[[], None]


@dataclass
class _Disk:
    """One channel that serves fetches one after the other."""

    free_at: float = 0.0

    def fetch(self, size: float, asked: float, sizes: Sizes) -> float:
        start = max(self.free_at, asked)
        self.free_at = start + size / sizes.disk_bandwidth
        return self.free_at + sizes.disk_latency


@dataclass
class _Known:
    """The blocks that a tenant has had computed; they name all before them."""

    blocks: set[int] = field(default_factory=set)

    def add(self, text: "array[int]") -> None:
        self.blocks.update(text[self.prefix(text) :])

    def prefix(self, text: "array[int]") -> int:
        count = len(text)
        # Beginnings of what is known are known, so the end can be looked for in halves.
        low, high = 0, count
        while low < high:
            middle = (low + high) // 2
            if text[middle] in self.blocks:
                low = middle + 1
            else:
                high = middle
        return low


class TierStack:
    """HBM, host memory and disk of one engine; without a policy all is kept by recency alone."""

    def __init__(self, sizes: Sizes, policy: Policy | None = None) -> None:
        self._sizes = sizes
        self._now_ms = 0
        self._disk = _Disk()
        self._worth = LoadOrCompute(_FETCH_TOKENS)
        self._known: dict[str, _Known] = {}
        self._policy = policy
        tokens = {Tier.HBM: sizes.hbm, Tier.CPU: sizes.cpu, Tier.NVME: sizes.nvme}
        self.tiers = {tier: self._tier(tier, size) for tier, size in tokens.items() if size}

    def _tier(self, tier: Tier, tokens: int) -> SimulatedTier:
        sizes, policy = self._sizes, self._policy
        if policy is None:
            return SimulatedTier(tokens // sizes.block, lambda: self._now_ms)
        return SimulatedTier(
            tokens // sizes.block,
            lambda: self._now_ms,
            QuotaBook(policy, tier, tokens, max(1, round(sizes.kv_bytes))),
            sizes.block,
            {owner: _alone(tier, life) for owner, life in lifetimes(policy).items()},
        )

    def owner(self, tenant: str) -> Owner:
        """Return whose pages a tenant's are."""
        known = None if self._policy is None else self._policy.tenants.get(TenantId(tenant))
        return tenant_owner(TenantId(tenant)) if known is None else known.owner

    def tick(self, now: float) -> None:
        """Let pages age until ``now``, in seconds."""
        self._now_ms = round(now * 1000)
        for tier in self.tiers.values():
            tier.tick()

    def known(self, request: PlanRequest) -> int:
        """Return how many tokens of a prompt this tenant has had computed; all but one at most."""
        known = self._known.setdefault(self.owner(request.tenant), _Known())
        return min(known.prefix(request.blocks) * self._sizes.block, request.prompt - 1)

    def place(self, request: PlanRequest, known: int) -> Placed | None:
        """Find a prompt, and give it and its answer room in HBM until they are released.

        None: there is no room now. Lower tiers are asked only where HBM has less than the ``known``
        tokens, since none has more.
        """
        owner, text, block = self.owner(request.tenant), request.blocks, self._sizes.block
        held = self.tiers[Tier.HBM].hold(owner, text + request.answer_blocks)
        if held is None:
            return None
        found, choice = dict[Tier, int](), dict[Tier, int]()
        reached = min(held.present * block, request.prompt - 1)
        if reached:
            found[Tier.HBM] = reached
        for tier in (Tier.CPU, Tier.NVME):
            if reached >= known or tier not in self.tiers:
                continue
            there = min(self.tiers[tier].find(owner, text) * block, request.prompt - 1)
            more = there - reached
            if more > 0 and self._worth.choose(tier, more) is Choice.LOAD:
                found[tier] = choice[tier] = more
                reached = there
        return Placed(found, choice, held.release)

    def fetch(self, tokens: int, asked: float) -> float:
        """Return when so many tokens, asked for at a time, have come from the disk."""
        if not tokens:
            return 0.0
        return self._disk.fetch(tokens * self._sizes.kv_bytes, asked, self._sizes)

    def disk_seconds(self, tokens: int) -> float:
        """Return how long the disk is busy with so many tokens."""
        return tokens * self._sizes.kv_bytes / self._sizes.disk_bandwidth

    def measured(self, new: int, compute: float, loads: Mapping[Tier, int], up: float) -> None:
        """Let what a request took be the measure of the next choice."""
        if new > 0:
            self._worth.computed(new, compute)
        if loads.get(Tier.CPU):
            self._worth.loaded(Tier.CPU, loads[Tier.CPU], up)
        if loads.get(Tier.NVME):
            seconds = self.disk_seconds(loads[Tier.NVME]) + self._sizes.disk_latency
            self._worth.loaded(Tier.NVME, loads[Tier.NVME], seconds)
        self._worth.agree(self._worth.proposal())

    def computed(self, request: PlanRequest) -> None:
        """Take note that a prompt was computed: from now on it is known."""
        owner = self.owner(request.tenant)
        self._known.setdefault(owner, _Known()).add(request.blocks)

    def answered(self, request: PlanRequest) -> None:
        """Take note that an answer was computed, and copy it down with its prompt."""
        owner = self.owner(request.tenant)
        self._known[owner].blocks.update(request.answer_blocks)
        text = request.blocks + request.answer_blocks
        for tier, held in self.tiers.items():
            if tier is not Tier.HBM:
                held.put(owner, text)


def _alone(tier: Tier, life: Lifetime) -> Lifetime:
    """Return a tier's own lifetime as that of a tree that is all there is.

    The disk drops at its time whatever the mode, since nobody waits for its room.
    """
    return replace(life, hbm_ms=life.of(tier), strict=life.strict or tier is Tier.NVME)

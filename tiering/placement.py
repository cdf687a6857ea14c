"""When a page leaves a tier because of its age: a pure rule, the same on every rank."""

from dataclasses import dataclass
from enum import StrEnum

from sglang_ext.types import Tier

__all__ = ["Lifetime", "Verdict", "judge"]


class Verdict(StrEnum):
    """What becomes of a copy."""

    KEEP = "keep"
    YIELD = "yield"
    """It is the first to go as soon as someone needs the room."""
    DEMOTE = "demote"
    """It is freed now; the copy below stays."""
    DROP = "drop"
    """It is freed now, and was the last copy."""


@dataclass(frozen=True, kw_only=True)
class Lifetime:
    """Milliseconds without use after which pages of an owner leave a tier.

    ``strict``: at once. Otherwise an idle machine keeps them until the room is needed. ``fixed``:
    since they were computed, used or not.
    """

    hbm_ms: int
    cpu_ms: int
    nvme_ms: int
    strict: bool = False
    fixed: bool = False

    def of(self, tier: Tier) -> int:
        """Return the lifetime in ``tier``."""
        return {Tier.HBM: self.hbm_ms, Tier.CPU: self.cpu_ms, Tier.NVME: self.nvme_ms}[tier]


def judge(tier: Tier, idle_ms: int, lifetime: Lifetime, *, lowest: Tier, copied: bool) -> Verdict:
    """Return what becomes of a copy in ``tier`` that nobody used for ``idle_ms``.

    ``lowest`` is the last tier that the engine has, ``copied`` tells whether the page lies in the
    next tier below. A page without a copy below is not thrown away before its last tier, since its
    owner was promised more time there. The lowest tier keeps nothing beyond its lifetime when it is
    a disk, whose room nobody waits for.
    """
    if idle_ms < lifetime.of(tier):
        return Verdict.KEEP
    if tier is Tier.NVME:
        return Verdict.DROP
    if not lifetime.strict:
        return Verdict.YIELD
    if tier is lowest:
        return Verdict.DROP
    return Verdict.DEMOTE if copied else Verdict.YIELD

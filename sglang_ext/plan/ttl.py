"""What TTL a tenant should have, from its own usage: how soon its text comes back.

The export of a server says how many prompt tokens came back within which time, cached or not
(``observe.reuse``). A TTL of t keeps those that came back within t. What it holds follows from
Little's law: every use of a token, by a prompt or as an answer, keeps it until its next use or for
t, whichever comes first, so that

    tokens held = (sum over reuses of min(idle, t)  +  (uses - reuses) * t) / seconds observed

and never more than all distinct tokens, ``uses - reuses``.
"""

import csv
import io
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from sglang_ext.errors import PlanError
from sglang_ext.observe.reuse import BOUNDS, REUSED, column
from sglang_ext.types import Tier

__all__ = ["KEPT", "Advice", "Reuse", "advise", "read_usage"]

KEPT = {Tier.HBM: 0.5, Tier.CPU: 0.9, Tier.NVME: 0.99}
"""What share of the reused tokens should come back within the TTL of each tier."""

_HOUR = 3600


@dataclass(frozen=True)
class Reuse:
    """What one tenant did in the hours of an export, in tokens and seconds."""

    tenant: str
    seconds: float
    """From the beginning of the first hour to the end of the last one, of any tenant."""
    uses: int
    """Prompt and output tokens: each is computed or used once."""
    reused: int
    within: Mapping[int, int]
    """Reused tokens by the bound that they came back within, those of lower bounds included."""

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]], tenant: str) -> "Reuse":
        """Add up the rows of one tenant. Raises PlanError where there are none to learn from."""
        rows = list(rows)
        names = sorted({str(row["tenant"]) for row in rows})
        mine = [row for row in rows if row["tenant"] == tenant]
        if not mine:
            found = ", ".join(names) or "nobody"
            raise PlanError(f"no usage of {tenant!r}; the export has {found}")
        sums = Counter[str]()
        for row in mine:
            sums.update({name: float(row[name]) for name in row if name.endswith("_tokens")})
        if REUSED not in mine[0]:
            raise PlanError(f"the export has no column {REUSED}; an older server wrote it")
        return cls(
            tenant,
            _span(rows),
            round(sums["prompt_tokens"] + sums["output_tokens"]),
            round(sums[REUSED]),
            {bound: round(sums[column(bound)]) for bound in BOUNDS},
        )

    def kept(self, ttl: float) -> float:
        """Return the share of reused tokens that came back within ``ttl`` seconds, at least."""
        known = [self.within[bound] for bound in BOUNDS if bound <= ttl]
        return (known[-1] if known else 0) / self.reused if self.reused else 0.0

    def held(self, ttl: int) -> float:
        """Return about how many tokens a TTL, one of BOUNDS, holds in the mean."""
        below, token_seconds = 0, 0.0
        for shorter, bound in zip((0, *BOUNDS), BOUNDS, strict=False):
            if bound > ttl:
                break
            # How they spread between two bounds is not known; evenly.
            token_seconds += (self.within[bound] - below) * (shorter + bound) / 2
            below = self.within[bound]
        distinct = self.uses - self.reused
        token_seconds += (self.reused - below + distinct) * ttl
        return min(token_seconds / self.seconds, float(distinct))

    def shortest(self, share: float) -> int | None:
        """Return the shortest TTL that keeps ``share``; None: no bound does."""
        return next((bound for bound in BOUNDS if self.kept(bound) >= share), None)


@dataclass(frozen=True)
class Advice:
    """A TTL in seconds for one tier, and why."""

    tier: Tier
    ttl: int
    reason: str


def read_usage(path: Path) -> list[dict[str, Any]]:
    """Read what ``sglang-ext usage`` printed, JSON or CSV. Raises PlanError and OSError."""
    text = path.read_text("utf-8")
    try:
        if text.lstrip().startswith("{"):
            rows = json.loads(text)["usage"]
        else:
            rows = list(csv.DictReader(io.StringIO(text)))
        for row in rows:
            row["tenant"], _hour(row)
    except (ValueError, KeyError, TypeError) as error:
        raise PlanError(f"{path}: no export of sglang-ext usage ({error!r})") from None
    return rows


def advise(reuse: Reuse, room: Mapping[Tier, int]) -> list[Advice]:
    """Return a TTL for every tier of ``room``, which says how many tokens the tenant may hold.

    The shortest that keeps what KEPT asks of the tier, or the longest that the room can hold where
    that is shorter; never shorter than that of the tier above. Raises PlanError without any reuse.
    """
    if not reuse.reused:
        raise PlanError(
            f"{reuse.tenant} sent no text twice in {reuse.seconds / _HOUR:g} hours: no TTL keeps a "
            "hit, and 0s costs nothing"
        )
    found: list[Advice] = []
    for tier, tokens in room.items():
        advice = _advise(reuse, tier, tokens)
        if found and advice.ttl < found[-1].ttl:
            advice = Advice(tier, found[-1].ttl, f"not shorter than {found[-1].tier}'s")
        found.append(advice)
    return found


def _advise(reuse: Reuse, tier: Tier, tokens: int) -> Advice:
    wanted, share = reuse.shortest(KEPT[tier]), KEPT[tier]
    reason = f"the shortest that keeps {share:.0%}"
    if wanted is None:
        wanted, reason = BOUNDS[-1], f"no TTL keeps {share:.0%}; the longest that is counted"
    fitting = [bound for bound in BOUNDS if reuse.held(bound) <= tokens]
    if reuse.held(wanted) > tokens:
        wanted = fitting[-1] if fitting else BOUNDS[0]
        reason = f"the longest whose tokens fit its {tokens:,}"
        if not fitting:
            reason = f"even this holds more than its {tokens:,} tokens"
    return Advice(tier, wanted, reason)


def _span(rows: Iterable[Mapping[str, Any]]) -> float:
    hours = [_hour(row) for row in rows]
    return (max(hours) - min(hours)).total_seconds() + _HOUR


def _hour(row: Mapping[str, Any]) -> datetime:
    return datetime.fromisoformat(str(row["hour"]).replace("Z", "+00:00"))

"""All attacks on one server, one after another."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sglang_ext.audit import harm, hits, outside, reads, timing
from sglang_ext.audit.party import Party, Prompts
from sglang_ext.audit.report import Finding

__all__ = ["Target", "audit"]


@dataclass(frozen=True)
class Target:
    """What is attacked, and how thoroughly: ``pairs`` of times for each length of a prefix."""

    url: str
    victim_key: str
    attacker_key: str
    admin_key: str = ""
    nvme_folder: Path | None = None
    kv_events: str | None = None
    pairs: int = 40
    seed: int = 0
    lengths: tuple[int, ...] = timing.LENGTHS


def audit(target: Target) -> Iterator[Finding]:
    """Yield a row as soon as its attack is over. Raises ServerError where nothing answers."""
    victim, attacker = (Party(target.url, key) for key in (target.victim_key, target.attacker_key))
    try:
        if target.admin_key:
            _begin_cold(target)
        yield from _rows(target, victim, attacker, Prompts(victim, target.seed))
    finally:
        victim.close()
        attacker.close()


def _rows(target: Target, victim: Party, attacker: Party, prompts: Prompts) -> Iterator[Finding]:
    name, both = victim.name(), (victim, attacker, prompts)
    for length in target.lengths:
        yield from timing.probe(*both, length, target.pairs)
    attacks: list[Callable[[], Finding]] = [
        lambda: timing.batch_order(*both, max(4, target.pairs // 2)),
        lambda: hits.cached_token_fields(*both),
        lambda: hits.forged_body(*both, name),
        lambda: hits.forged_headers(*both, name),
        lambda: harm.foreign_abort(*both, name),
        lambda: harm.foreign_session(*both),
        lambda: harm.foreign_flush(*both, name),
        lambda: reads.metrics(*both),
        lambda: reads.error_texts(*both, name),
        lambda: reads.policy_reads(attacker, name),
        lambda: reads.no_key(target.url, prompts),
        lambda: outside.kv_events(*both, target.kv_events),
        lambda: outside.nvme_files(victim, prompts, target.nvme_folder),
        lambda: harm.deadly_requests(*both),
    ]
    for attack in attacks:
        yield attack()


def _begin_cold(target: Target) -> None:
    """Empty the cache, so that nothing of an earlier run helps or hinders."""
    admin = Party(target.url, target.admin_key)
    try:
        admin.post("/flush_cache", None)
    finally:
        admin.close()

"""Prompt probing: do times tell whether somebody else sent the beginning of a prompt before?

The victim sends a prompt. The attacker then sends its beginning with another end, and a prompt of
the same length that is new; which comes first is drawn. A third one, the attacker's own again,
shows that a hit could have been seen at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from sglang_ext.audit.party import Party, Prompts, Times
from sglang_ext.audit.report import Finding, verdict_of
from sglang_ext.audit.statistics import AucInterval, bootstrap_interval

__all__ = ["LENGTHS", "batch_order", "probe"]

LENGTHS = (1, 8, 16, 64, 512)
"""Tokens that the two prompts have in common."""
_LEVEL = 0.999
_TAIL = 8
_ANSWER = 3
_BATCH_PREFIX = 160
_BATCH = 6


@dataclass
class Samples:
    """Times of new prompts, of the victim's, and of the attacker's own again."""

    cold: list[Times] = field(default_factory=list)
    warm: list[Times] = field(default_factory=list)
    own: list[Times] = field(default_factory=list)


def probe(
    victim: Party, attacker: Party, prompts: Prompts, length: int, pairs: int
) -> list[Finding]:
    """Return two rows: by the time to the first token, and by the time between tokens."""
    samples = Samples()
    for _ in range(pairs):
        _take_pair(victim, attacker, prompts, length, samples)
    first = _row(
        f"time to first token, {length} shared tokens",
        *([times.first for times in group] for group in _groups(samples)),
    )
    gaps = _row(
        f"inter-token time, {length} shared tokens",
        *([_mean(times.gaps) for times in group] for group in _groups(samples)),
    )
    return [first, gaps]


def batch_order(victim: Party, attacker: Party, prompts: Prompts, rounds: int) -> Finding:
    """Return the row: do prompts that the victim sent come back earlier within one batch?"""
    cold: list[float] = []
    warm: list[float] = []
    for _ in range(rounds):
        ranks = _one_batch(victim, attacker, prompts)
        half = len(ranks) // 2
        warm += ranks[:half]
        cold += ranks[half:]
    found = bootstrap_interval(cold, warm, _LEVEL)
    problems = [f"AUC {_text(found)}"] if found.tells else []
    detail = f"AUC {_text(found)} over {rounds} batches"
    return verdict_of("order of answers in a batch", problems, detail, **_figures(found))


def _take_pair(
    victim: Party, attacker: Party, prompts: Prompts, length: int, samples: Samples
) -> None:
    known, fresh = prompts.ids(length), prompts.ids(length + _TAIL)
    victim.warm(known + prompts.ids(_TAIL))
    probe_ids = known + prompts.ids(_TAIL)
    both = [(probe_ids, samples.warm), (fresh, samples.cold)]
    for ids, times in both if prompts.first_is_slow() else both[::-1]:
        times.append(attacker.times(ids, _ANSWER))
    samples.own.append(attacker.times(fresh, _ANSWER))


def _groups(samples: Samples) -> tuple[list[Times], list[Times], list[Times]]:
    return samples.cold, samples.warm, samples.own


def _row(
    attack: str, cold: Sequence[float], warm: Sequence[float], own: Sequence[float]
) -> Finding:
    found = bootstrap_interval(cold, warm, _LEVEL)
    control = bootstrap_interval(cold, own, _LEVEL)
    problems = [f"AUC {_text(found)}"] if found.tells else []
    detail = f"AUC {_text(found)}; its own prompt again: {control.auc:.2f}"
    figures = {**_figures(found), "own_auc": control.auc, "pairs": len(cold)}
    return verdict_of(attack, problems, detail, **figures)


def _one_batch(victim: Party, attacker: Party, prompts: Prompts) -> list[float]:
    """Return when each prompt of a batch answered, by rank: first the victim's, then new ones."""
    known = [prompts.ids(_BATCH_PREFIX) for _ in range(_BATCH // 2)]
    for ids in known:
        victim.warm(ids)
    sent = [ids + prompts.ids(_TAIL) for ids in known]
    sent += [prompts.ids(_BATCH_PREFIX + _TAIL) for _ in known]
    order = prompts.shuffled(len(sent))
    first_seen: list[int] = []
    batch = {"input_ids": [sent[place] for place in order]}
    for event in attacker.events([], 1, **batch):
        index = order[int(event.get("index", 0))]
        if index not in first_seen:
            first_seen.append(index)
    ranks = {index: float(rank) for rank, index in enumerate(first_seen)}
    return [ranks.get(index, float(len(sent))) for index in range(len(sent))]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _text(found: AucInterval) -> str:
    return f"{found.auc:.2f} ({found.low:.2f} to {found.high:.2f})"


def _figures(found: AucInterval) -> dict[str, float]:
    return {"auc": found.auc, "low": found.low, "high": found.high}

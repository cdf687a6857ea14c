"""Who gives back running tokens: to go on decoding, or to let a higher class in."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from sglang_ext.types import Owner, OwnerLimits

__all__ = ["MOST_PREEMPTIONS", "preemption_order", "retraction_order"]

MOST_PREEMPTIONS = 8
"""So often a request gives way; after that it runs to its end, so that it ends however many come.
"""


def retraction_order(
    requests: Sequence[tuple[Owner, int]],
    fixed: Mapping[Owner, int],
    limits: Callable[[Owner], OwnerLimits],
    capacity: int,
) -> list[int]:
    """Return the indices of running ``requests`` (owner, tokens that it would free) to retract,
    the first to go first.

    ``fixed`` are the tokens that each owner's requests hold or lock of ``capacity``. As long as
    somebody is above its fair share, basic before standard before premium, and in a class who is
    furthest above; then whoever is nearest to it. An owner's own requests go from the last to the
    first. O(requests * owners); memory is rarely short.
    """
    queues: dict[Owner, list[int]] = {}
    for index, (owner, _) in enumerate(requests):
        queues.setdefault(owner, []).append(index)
    excess = _excess({owner: limits(owner) for owner in queues}, fixed, capacity)

    def claim(owner: Owner) -> tuple[bool, int, float]:
        over = excess[owner] > 0
        return (not over, limits(owner).rank if over else 0, -excess[owner])

    order: list[int] = []
    while queues:
        owner = min(queues, key=claim)
        index = queues[owner].pop()
        excess[owner] -= requests[index][1]
        order.append(index)
        if not queues[owner]:
            del queues[owner]
    return order


def preemption_order(
    newcomer: Owner,
    requests: Sequence[tuple[Owner, int]],
    fixed: Mapping[Owner, int],
    limits: Callable[[Owner], OwnerLimits],
    capacity: int,
) -> list[int]:
    """Return the indices of running ``requests`` that give way to a request of ``newcomer``.

    Only lower classes give, and of them only what is above their fair share: so much nobody can be
    driven below. The order is that of ``retraction_order``, and so are the other arguments.
    """
    known = {owner: limits(owner) for owner in {newcomer, *(owner for owner, _ in requests)}}
    excess = _excess(known, fixed, capacity)
    order: list[int] = []
    for index in retraction_order(requests, fixed, limits, capacity):
        owner, tokens = requests[index]
        if known[owner].rank < known[newcomer].rank and excess[owner] >= tokens:
            excess[owner] -= tokens
            order.append(index)
    return order


def _excess(
    limits: Mapping[Owner, OwnerLimits], fixed: Mapping[Owner, int], capacity: int
) -> Counter[Owner]:
    """Return what each owner holds above its share: its reserve, and its part of the rest."""
    weights = sum(limit.weight for limit in limits.values())
    rest = max(0, capacity - sum(limit.reserve for limit in limits.values()))
    excess: Counter[Owner] = Counter()
    for owner, limit in limits.items():
        share = limit.reserve + rest * limit.weight / weights
        excess[owner] = round(fixed.get(owner, 0) - share)
    return excess

"""Hooks on SGLang's DataParallelController: which rank computes a request, and that all are equal.

The first wraps the one method of choosing that also tells how busy each rank is, and hands its
choice on in the field that SGLang routes by. No client can set that field (``tenancy.identity``).
The second ends a start in which one rank has less room than the others. Inside of one group of
ranks (tensor or expert parallelism, DP attention) SGLang gives each the room of the smallest.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from sglang_ext.errors import UnsupportedError
from sglang_ext.namespace import parse
from sglang_ext.patches.hooks import Hook
from sglang_ext.request_tag import detach
from sglang_ext.types import Owner

__all__ = ["RANK_METHOD", "Router", "check_room", "rank_hooks"]

RANK_METHOD = "total_tokens"
"""The value of ``--load-balance-method`` under which the hook runs."""

_MOST_UNEVEN = 1.05
"""How many times the smallest room the mean may be."""

_CONTROLLER = "sglang.srt.managers.data_parallel_controller.DataParallelController"


class Router(Protocol):
    """Chooses; see ``sglang_ext.rank_router``."""

    def choose(
        self,
        owner: Owner,
        session: str,
        division: str,
        tokens: Sequence[int],
        in_flight: Mapping[int, int],
    ) -> int: ...


def rank_hooks(make: Callable[[int], Router]) -> list[Hook]:
    """Return the hooks; ``make`` is called once, with the tokens that all ranks can hold."""
    routers: list[Router] = []

    def schedule(original: Callable[..., None], controller: Any, req: Any) -> None:
        active = controller._active_workers
        if req.routed_dp_rank is None and active:
            if not routers:
                routers.append(make(controller.max_total_num_tokens * len(active)))
            req.routed_dp_rank = _chosen(routers[0], controller, req)
        original(controller, req)

    def get_init_info(original: Callable[..., dict[str, Any]], controller: Any) -> dict[str, Any]:
        infos = controller._scheduler_init_infos
        check_room([int(info["max_total_num_tokens"]) for info in infos])
        return original(controller)

    return [
        Hook(f"{_CONTROLLER}.total_tokens_scheduler", schedule, ("self", "req")),
        Hook(f"{_CONTROLLER}.get_init_info", get_init_info, ("self",)),
    ]


def check_room(tokens: Sequence[int]) -> None:
    """Raise UnsupportedError where one rank would be full long before the others.

    ``tokens``: what each rank's pool holds, in tokens.
    """
    least, mean = min(tokens), sum(tokens) / len(tokens)
    if mean > _MOST_UNEVEN * least:
        room = ", ".join(map(str, tokens))
        raise UnsupportedError(
            f"the data-parallel ranks have room for {room} tokens: the smallest would be full at "
            f"{least / mean:.0%} of the mean; free its memory, or give each the same with "
            f"--max-total-tokens {least}"
        )


def _chosen(router: Router, controller: Any, req: Any) -> int:
    tag, extra_key = detach(getattr(req, "extra_key", None))
    space = parse(extra_key)
    session = tag.session or getattr(getattr(req, "session_params", None), "id", None) or ""
    division = repr((space.client_key, space.once, space.lora, getattr(req, "cache_salt", None)))
    # SGLang reads the ranks' own numbers every 20 ms; what was sent since, it counts itself.
    requests = controller.dp_budget.total_requests
    in_flight = {rank: requests[rank] for rank in controller._active_workers}
    # What leaves no pages is in nobody's way later.
    tokens = () if space.once else req.input_ids or ()
    rank = router.choose(space.owner, session, division, tokens, in_flight)
    requests[rank] += 1
    return rank

"""The one place that decides a process's threads: how many, on which cores, and how they wait.

A process has the cores that the system lets it have (``taskset`` narrows them). The engines of one
gateway divide them, and the ranks of one engine what it has. Servers that share a machine share its
cores by the system's scheduler, which is fair as long as waiting threads sleep: so a thread that
has nothing to do spins for some tens of microseconds, the time between two operators of a model,
and not for GNU OpenMP's milliseconds.
"""

import os
from collections.abc import MutableMapping, Sequence

import torch

__all__ = ["bind_rank", "divide_cores", "keep_share", "set_thread_defaults"]

_BINDING = "SGLANG_CPU_OMP_THREADS_BIND"
_SPINS = "3000"


def divide_cores(cores: Sequence[int], ranks: int) -> list[list[int]]:
    """Give each of ``ranks`` its share of ``cores``; with too few, some ranks share the first."""
    return [list(cores[rank::ranks]) or [cores[0]] for rank in range(ranks)]


def keep_share(index: int, count: int) -> list[int]:
    """Keep this process, and those that it starts, on the share ``index`` of ``count``.

    Threads that are there already move too.
    """
    cores = divide_cores(sorted(os.sched_getaffinity(0)), count)[index]
    _move_to(cores)
    return cores


def set_thread_defaults(ranks: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Note in ``environment``, for the processes to come, how they wait and which cores are whose.

    What is set there already stays. SGLang reads the shares by rank; without them it asks for one
    NUMA node a rank.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(environment):
        environment["GOMP_SPINCOUNT"] = _SPINS
    if ranks > 1 and _BINDING not in environment:
        shares = divide_cores(sorted(os.sched_getaffinity(0)), ranks)
        environment[_BINDING] = "|".join(",".join(map(str, share)) for share in shares)


def bind_rank(rank: int, environment: MutableMapping[str, str] = os.environ) -> list[int] | None:
    """Keep this process on its share of the cores, one thread each; None where there are no shares.

    Threads that are there already move too.
    """
    binding = environment.get(_BINDING, "all")
    if binding == "all":
        return None
    cores = _parse(binding.split("|")[rank])
    _move_to(cores)
    torch.set_num_threads(len(cores))
    return cores


def _move_to(cores: Sequence[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


def _parse(share: str) -> list[int]:
    """Read a list of cores such as ``0-3,8``."""
    cores: list[int] = []
    for part in share.split(","):
        first, _, last = part.partition("-")
        cores.extend(range(int(first), int(last or first) + 1))
    return cores

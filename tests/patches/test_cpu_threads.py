"""How the cores of a machine are divided, and that a rank stays on its own."""

import os
import subprocess
import sys

import pytest

from sglang_ext.patches.cpu_threads import bind_rank, divide_cores, set_thread_defaults


@pytest.mark.parametrize("cores", [[0], [0, 1], [3, 4, 5, 9]])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_every_core_belongs_to_one_rank_and_every_rank_has_one(
    cores: list[int], ranks: int
) -> None:
    shares = divide_cores(cores, ranks)
    assert len(shares) == ranks
    assert all(shares)
    assert {core for share in shares for core in share} == set(cores)
    if ranks <= len(cores):
        assert sorted(core for share in shares for core in share) == cores
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_one_rank_is_not_bound() -> None:
    environment: dict[str, str] = {}
    set_thread_defaults(1, environment)
    assert list(environment) == ["GOMP_SPINCOUNT"]
    assert bind_rank(0, environment) is None


def test_what_is_set_already_stays() -> None:
    given = {"OMP_WAIT_POLICY": "passive", "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    environment = dict(given)
    set_thread_defaults(2, environment)
    assert environment == given


def test_ranks_have_shares_that_sglang_reads() -> None:
    environment: dict[str, str] = {}
    set_thread_defaults(2, environment)
    shares = environment["SGLANG_CPU_OMP_THREADS_BIND"].split("|")
    assert len(shares) == 2
    assert {int(core) for share in shares for core in share.split(",")} == os.sched_getaffinity(0)


def test_a_rank_keeps_to_its_cores_with_all_threads() -> None:
    core = min(os.sched_getaffinity(0))
    program = f"""
import os, torch
from sglang_ext.patches.cpu_threads import bind_rank
torch.ones(500, 500) @ torch.ones(500, 500)
print(bind_rank(1, {{"SGLANG_CPU_OMP_THREADS_BIND": "9|{core}-{core}"}}), torch.get_num_threads())
tasks = os.listdir("/proc/self/task")
print({{tuple(os.sched_getaffinity(int(task))) for task in tasks}} == {{({core},)}})
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert result.stdout.splitlines() == [f"[{core}] 1", "True"]


def test_engines_keep_to_disjoint_cores_with_all_threads() -> None:
    program = """
import os, sys, threading
from sglang_ext.patches.cpu_threads import keep_share
waiting = threading.Event()
threading.Thread(target=waiting.wait, daemon=True).start()
cores = keep_share(int(sys.argv[1]), 2)
tasks = os.listdir("/proc/self/task")
assert {tuple(os.sched_getaffinity(int(task))) for task in tasks} == {tuple(cores)}
print(*cores)
"""
    shares = [
        set(subprocess.check_output([sys.executable, "-c", program, index], timeout=120).split())
        for index in ("0", "1")
    ]
    own = os.sched_getaffinity(0)
    assert {int(core) for core in set.union(*shares)} == own
    assert len(own) < 2 or not set.intersection(*shares)

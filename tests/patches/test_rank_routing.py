"""The hook on SGLang's controller routes by our router, within what SGLang's own router allows."""

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.data_parallel_controller import DataParallelController, DPBudget
from sglang.srt.server_args import prepare_server_args

from sglang_ext.errors import UnsupportedError
from sglang_ext.namespace import frame
from sglang_ext.patches.rank_routing import RANK_METHOD, rank_hooks
from sglang_ext.patches.versions import check_signature
from sglang_ext.rank_flags import check_ranks, use_router
from sglang_ext.request_tag import RequestTag, attach
from sglang_ext.types import Owner


class Recorder:
    """A router that always says the same, and remembers what it was asked."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.asked: list[tuple[Any, ...]] = []

    def choose(self, *question: Any) -> int:
        self.asked.append(question)
        return self.rank


class Sockets:
    """SGLang's controller without processes: what it would send to whom."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, router: Recorder) -> None:
        self.sent: list[int] = []
        self.made: list[int] = []
        module = "sglang.srt.managers.data_parallel_controller.sock_send"
        monkeypatch.setattr(module, lambda rank, req: self.sent.append(rank))
        self.controller = object.__new__(DataParallelController)
        vars(self.controller).update(
            workers=[0, 1, 2],
            _active_workers=[0, 2],
            max_total_num_tokens=1000,
            dp_budget=DPBudget(3),
        )
        self.hook, _ = rank_hooks(lambda capacity: self.made.append(capacity) or router)

    def dispatch(self, **fields: Any) -> None:
        req = SimpleNamespace(**{"routed_dp_rank": None, "input_ids": [1, 2, 3], **fields})
        original = DataParallelController.total_tokens_scheduler
        self.hook.function(original, self.controller, req)


def test_the_router_is_told_whose_a_request_is(monkeypatch: pytest.MonkeyPatch) -> None:
    router = Recorder(2)
    sockets = Sockets(monkeypatch, router)
    owner = Owner("t:a")
    sockets.dispatch(extra_key=attach(RequestTag("chat"), frame(owner, "mine")), cache_salt="s")
    sockets.dispatch(extra_key=frame(owner, "", "once"))
    sockets.dispatch(extra_key=frame(owner), session_params=SimpleNamespace(id="a/open"))
    sockets.dispatch()
    assert sockets.sent == [2, 2, 2, 2]
    assert sockets.made == [2000]
    (first, once, session, warm_up) = router.asked
    assert first[:2] == (owner, "chat")
    assert first[3:] == ([1, 2, 3], {0: 0, 2: 0})
    assert first[2] != once[2]
    assert once[3] == ()
    assert session[:2] == (owner, "a/open")
    assert warm_up[0] == "t:system"
    assert warm_up[4] == {0: 0, 2: 3}, "what was sent is counted before the ranks tell"


def test_a_rank_that_was_named_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    router = Recorder(2)
    sockets = Sockets(monkeypatch, router)
    sockets.dispatch(routed_dp_rank=0)
    assert sockets.sent == [0]
    assert not router.asked


def test_sglang_has_what_the_hook_needs() -> None:
    names = []
    for hook in rank_hooks(lambda capacity: Recorder(0)):
        names.append(hook.target.rpartition(".")[2])
        check_signature(getattr(DataParallelController, names[-1]), hook.parameters)
    assert names == [f"{RANK_METHOD}_scheduler", "get_init_info"]


def test_ranks_with_other_room_end_the_start_with_the_numbers() -> None:
    _, hook = rank_hooks(lambda capacity: Recorder(0))

    def start(*tokens: int) -> Any:
        infos = [{"max_total_num_tokens": count} for count in tokens]
        return hook.function(lambda _: "started", SimpleNamespace(_scheduler_init_infos=infos))

    assert start(1000) == start(1000, 1000) == start(1000, 1090) == "started"
    with pytest.raises(
        UnsupportedError, match="20000, 16000 tokens: the smallest .* 89%"
    ) as refused:
        start(20000, 16000)
    assert "--max-total-tokens 16000" in str(refused.value)


_MODEL = ["--model-path", "unused", "--device", "cpu"]


@pytest.mark.parametrize("flags", [["--dp", "2"], ["--data-parallel-size", "2"]])
def test_several_ranks_have_our_router(flags: list[str]) -> None:
    args = prepare_server_args([*_MODEL, *flags])
    use_router(args)
    assert args.load_balance_method == RANK_METHOD
    check_ranks(args)


@pytest.mark.parametrize("method", ["round_robin", "total_requests", "follow_bootstrap_room"])
def test_another_order_of_several_ranks_is_refused(method: str) -> None:
    args = prepare_server_args([*_MODEL, "--dp", "2", "--load-balance-method", method])
    use_router(args)
    with pytest.raises(UnsupportedError, match=f"--load-balance-method {method} is refused"):
        check_ranks(args)


def test_one_rank_may_have_any() -> None:
    args = prepare_server_args([*_MODEL, "--load-balance-method", "round_robin"])
    use_router(args)
    check_ranks(args)
    assert args.load_balance_method == "round_robin"

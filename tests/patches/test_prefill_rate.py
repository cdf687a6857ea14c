"""How long prefills take, as far as it can be told from the outside."""

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_ext.patches import prefill_rate
from sglang_ext.patches.prefill_rate import prefill_rate_hooks


class Scheduler:
    """Processes nothing, and remembers what was measured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.measured: list[tuple[int, float]] = []
        self.now = 100.0
        worth = SimpleNamespace(computed=lambda *told: self.measured.append(told))
        self.tree_cache = SimpleNamespace(worth=worth)
        monkeypatch.setattr(prefill_rate, "time", SimpleNamespace(monotonic=lambda: self.now))
        (self.hook,) = prefill_rate_hooks()

    def run(self, launched: float, ended: float, mode: ForwardMode, **changes: Any) -> None:
        fields = {"extend_lens": [30, 12], "reqs": [SimpleNamespace(host_loaded_length=0)]}
        batch = SimpleNamespace(launch_ts=launched, forward_mode=mode, **{**fields, **changes})

        def original(scheduler: Any, batch: Any, result: Any) -> None:
            self.now = ended

        self.hook.function(original, self, batch, None)


def test_only_prefills_count_and_from_when_the_batch_before_had_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = Scheduler(monkeypatch)
    scheduler.run(100, 103, ForwardMode.EXTEND)
    scheduler.run(101, 105, ForwardMode.EXTEND)
    scheduler.run(105, 106, ForwardMode.DECODE, extend_lens=None)
    scheduler.run(105.5, 109, ForwardMode.EXTEND)
    assert scheduler.measured == [(42, 3), (42, 2), (42, 3)]


def test_a_batch_that_waited_for_a_load_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(monkeypatch)
    loaded = [SimpleNamespace(host_loaded_length=16)]
    scheduler.run(100, 103, ForwardMode.EXTEND, reqs=loaded)
    scheduler.run(0, 104, ForwardMode.EXTEND)
    assert scheduler.measured == []

"""What a process records, and where it writes it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_ext import active
from sglang_ext.errors import UsageError
from sglang_ext.metrics import FinishedRequest, RequestMetrics
from sglang_ext.observe import recording
from sglang_ext.observe.usage_store import UsageStore


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[RequestMetrics]:
    """A process that has recorded nothing."""
    metrics = RequestMetrics(5)
    monkeypatch.setattr(active, "request_metrics", lambda: metrics)
    monkeypatch.setenv(recording.USAGE_VARIABLE, "")
    for kept in (recording.usage, recording.recent):
        kept.cache_clear()
    yield metrics
    recording.close()
    for kept in (recording.usage, recording.recent):
        kept.cache_clear()


def _request() -> FinishedRequest:
    return FinishedRequest(tenant="a", prompt=40, output=2, cached={"hbm": 16}, seconds=1.0)


def test_a_finished_request_reaches_the_file(fresh: RequestMetrics, tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    recording.hand_over(path)
    recording.record_requests(page_size=16)
    for observer in fresh.observers:
        observer.finished(_request())
    recording.close()
    ((cell, amounts),) = UsageStore(path).read(0, float("inf"))
    assert (cell.tenant, amounts["prompt_tokens"], amounts["cached_hbm_tokens"]) == ("a", 40, 16)
    assert recording.recent().service()["hit_rate"] == 0.5
    assert fresh.page_size == 16


def test_without_a_file_only_the_last_requests_are_kept(fresh: RequestMetrics) -> None:
    recording.hand_over(None)
    assert recording.USAGE_VARIABLE not in os.environ
    recording.record_requests(page_size=1)
    assert recording.usage() is None
    assert recording.held_usage() is None
    assert fresh.observers == [recording.recent()]


def test_a_file_that_cannot_be_had_is_refused_at_launch(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere"):
        recording.hand_over(tmp_path / "nowhere" / "usage.db")
    assert recording.USAGE_VARIABLE not in os.environ


def test_closing_what_was_never_open_does_nothing() -> None:
    recording.hand_over(None)
    recording.close()
    assert recording.usage.cache_info().currsize == 0

"""A registry of metrics for each test, and at the end a table of the trials that were kept.

A trial is a public bug report that tests are marked with (``trial`` markers).
"""

import functools
from collections import defaultdict
from collections.abc import Iterator

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry

_outcomes: dict[int, list[str]] = defaultdict(list)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Remember how each test of a trial ended."""
    report = yield
    if report.when == "call" or report.failed:
        for mark in item.iter_markers("trial"):
            _outcomes[mark.args[0]].append(report.outcome)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print one line a trial: kept only when every one of its tests passed."""
    if not _outcomes:
        return
    terminalreporter.section("compliance: known failures of systems that do this job")
    for trial, outcomes in sorted(_outcomes.items()):
        passed = outcomes.count("passed")
        verdict = "kept" if passed == len(outcomes) else "BROKEN"
        terminalreporter.write_line(f"trial {trial:3}  {verdict:6}  {passed}/{len(outcomes)} tests")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> CollectorRegistry:
    """A registry that takes the place of the process's own."""
    fresh = CollectorRegistry()
    for name in ("Counter", "Gauge", "Histogram"):
        metric = functools.partial(getattr(prometheus_client, name), registry=fresh)
        monkeypatch.setattr(prometheus_client, name, metric)
    return fresh

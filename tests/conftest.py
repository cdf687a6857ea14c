"""Ends a run with a table of the public bug reports that it tested against (``trial`` markers)."""

from collections import defaultdict
from collections.abc import Iterator

import pytest

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

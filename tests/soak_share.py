"""A plugin of pytest that adds a small share of the soak tests to a run, another one each commit.

Nothing may break unseen for long: of the tests that take less than 45 s, each run has as
many as fit into its budget. Which ones follows from the date of the commit alone, so that a run can
be repeated. Those that this machine cannot run are named with why.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

MOST_SECONDS = 45.0  # of one test
BUDGET_SECONDS = 60.0  # of all: they run beside others, and most of them wait
ROOT = Path(__file__).parent.parent


def shares(seconds: Mapping[str, float]) -> list[list[str]]:
    """All short tests in shares of about the same time, mixed by their names' digests."""
    short = [test for test, took in seconds.items() if took < MOST_SECONDS]
    short.sort(key=lambda test: hashlib.sha256(test.encode()).digest())
    made: list[list[str]] = []
    left = 0.0
    for test in short:
        if not made or seconds[test] > left:
            made.append([])
            left = BUDGET_SECONDS
        made[-1].append(test)
        left -= seconds[test]
    return made


def commit_seconds(root: Path = ROOT) -> int:
    """When the commit that lies here was made; 0: this is no clone."""
    command = ["git", "-C", str(root), "log", "-1", "--format=%ct"]
    try:
        made = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(made.stdout)


class SoakShare:
    """Adds a share of the soak tests, and says what became of each. ``number``: from 1 on."""

    def __init__(self, seconds: Mapping[str, float], number: int | None = None) -> None:
        self._all = shares(seconds)
        chosen = commit_seconds() if number is None else number - 1
        self.number = chosen % max(1, len(self._all)) + 1
        self.tests = self._all[self.number - 1] if self._all else []
        self._seconds = seconds
        self.by_file = Counter[str]()  # seconds, by the path of a file from the root
        for test in self.tests:
            self.by_file[test.partition("::")[0]] += seconds[test]
        self._became: dict[str, str] = {}
        self._unknown = 0  # soak tests whose time nobody has stored

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Iterator[None]:
        """Keep the chosen ones, which are left out with all soak tests otherwise."""
        soaks = {item.nodeid: item for item in items if item.get_closest_marker("soak")}
        self._unknown = sum(test not in self._seconds for test in soaks)
        yield
        there = {item.nodeid for item in items}
        for test in self.tests:
            if test not in soaks:
                self._became[test] = "was not collected: it is gone, or its file is skipped here"
            elif test not in there:
                items.append(soaks[test])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember what became of each, with the reason where it was skipped."""
        if report.nodeid in self.tests and (report.when == "call" or not report.passed):
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.outcome
            self._became[report.nodeid] = why

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Names them, so that a failure can be repeated."""
        share = f"{self.number} of {len(self._all)}"
        terminalreporter.section(f"soak tests of this commit: share {share}")
        for test in self.tests:
            terminalreporter.line(f"{test}: {self._became.get(test, 'did not run')}")
        terminalreporter.line(
            f"again: `pytest -m soak 'TEST'`, or all of them: `--soak-share {self.number}`"
        )
        if self._unknown:
            terminalreporter.line(f"{self._unknown} soak tests have no stored time: `make soak`")

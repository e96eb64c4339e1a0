"""A plugin of pytest that writes down how long each soak test took (`make soak` has it).

`make test` chooses its share of them by these seconds (`tests/soak_share.py`). What failed, or was
skipped here, keeps the time that it had.
"""

from __future__ import annotations

import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

STORED = Path(__file__).parent / "soak_seconds.toml"
HEAD = "# How long soak tests take, in seconds: `make soak` writes it, `make test` chooses by it.\n"

_reports: defaultdict[str, list[pytest.TestReport]] = defaultdict(list)


def stored_soaks() -> dict[str, float]:
    """Seconds by the id of a test."""
    return tomllib.loads(STORED.read_text()) if STORED.exists() else {}


def store(seconds: dict[str, float]) -> None:
    rows = [f"{_quoted(test)} = {took:.1f}\n" for test, took in sorted(seconds.items())]
    STORED.write_text(HEAD + "".join(rows))


def _quoted(test: str) -> str:
    return f"'{test}'" if "'" not in test else '"' + test.replace('"', '\\"') + '"'


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Store at once: a soak that is interrupted has told something, too."""
    if "soak" not in report.keywords:
        return
    _reports[report.nodeid].append(report)
    if report.when == "teardown":
        reports = _reports.pop(report.nodeid)
        if all(each.passed for each in reports):
            store(stored_soaks() | {report.nodeid: sum(each.duration for each in reports)})


def pytest_collection_finish(session: pytest.Session) -> None:
    """What the whole soak has no more is forgotten."""
    config = session.config
    whole = config.args == config.getini("testpaths") and not config.option.keyword
    if whole and config.option.markexpr == "soak":
        there = {item.nodeid for item in session.items}
        store({test: took for test, took in stored_soaks().items() if test in there})

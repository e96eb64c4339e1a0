"""The few soak tests that a commit runs: other ones each time, always the same of one commit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.soak_seconds import store, stored_soaks
from tests.soak_share import BUDGET_SECONDS, MOST_SECONDS, commit_seconds, shares

SECONDS = {f"test_{n}.py::test": n % 37 + 0.5 for n in range(300)}
FILE = """
import pytest
def test_always(): pass
@pytest.mark.soak
def test_runs(): pass
@pytest.mark.soak
def test_lacks_something(): pytest.skip("there is no Slurm here")
@pytest.mark.soak
def test_breaks(): assert 1 == 2
@pytest.mark.soak
def test_new(): raise AssertionError("nobody knows how long it takes")
"""
START = """
import sys, pytest
from tests.side_by_side import SideBySide
from tests.soak_share import SoakShare
took = {f"test_a.py::{name}": 1.0 for name in ("test_runs", "test_lacks_something", "test_breaks")}
share = SoakShare({**took, "test_a.py::test_gone": 1.0}, 1)
sys.exit(pytest.main(["--rootdir=.", "-p", "no:cacheprovider", "-m", "not soak", *sys.argv[1:]],
                     plugins=[share, SideBySide(2, {})]))
"""


def test_every_short_test_has_its_turn_within_the_budget() -> None:
    made = shares(SECONDS)
    turns = Counter(test for share in made for test in share)
    assert set(turns.values()) == {1}
    assert turns.keys() == {test for test, took in SECONDS.items() if took < MOST_SECONDS}
    for share in made:
        assert sum(SECONDS[test] for test in share) <= BUDGET_SECONDS
    assert shares(dict(reversed(SECONDS.items()))) == made


def test_the_share_is_that_of_the_commit(tmp_path: Path) -> None:
    assert commit_seconds(tmp_path) == 0  # no clone: the first share
    environment = os.environ | {"GIT_COMMITTER_DATE": "1700000000 +0000", "HOME": str(tmp_path)}
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], [*who, "commit", "-q", "--allow-empty", "-m", "One"]):
        subprocess.run(["git", *words], cwd=tmp_path, env=environment, check=True)
    assert commit_seconds(tmp_path) == 1_700_000_000


def test_its_tests_run_and_are_named_with_what_became_of_them(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(FILE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = soak: long\n")
    command = [sys.executable, "-c", START]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    made = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    said = made.stdout
    assert made.returncode == 1 and "1 failed, 2 passed, 1 skipped" in said, said + made.stderr
    assert "soak tests of this commit: share 1 of 1" in said
    for line in (
        "test_a.py::test_runs: passed",
        "test_a.py::test_lacks_something: Skipped: there is no Slurm here",
        "test_a.py::test_breaks: failed",
        "test_a.py::test_gone: was not collected: it is gone, or its file is skipped here",
        "1 soak tests have no stored time: `make soak`",
    ):
        assert f"{line}\n" in said, said


def test_stored_times_are_read_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.soak_seconds.STORED", tmp_path / "seconds.toml")
    assert stored_soaks() == {}
    seconds = {"a.py::test[x-'y']": 1.5, 'a.py::test["z"]': 20.0, "b.py::test": 0.1}
    store(seconds)
    assert stored_soaks() == seconds

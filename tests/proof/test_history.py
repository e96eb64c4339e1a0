"""The store keeps every measurement, and compares like with like."""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec
import pytest

from proof import history
from proof.history import Measurement


def measured(claim: str = "queue", rate: float = 100.0, **changes: object) -> Measurement:
    one = Measurement(
        claim=claim,
        date="2026-11-16",
        commit="abc",
        machine="here",
        busy=0.0,
        trusted=True,
        seconds=1.0,
        figures={"rate": rate},
    )
    return msgspec.structs.replace(one, **changes)


def test_what_is_appended_is_read_again_and_stored_once(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    history.append([measured(), measured("core")], path)
    history.append([measured(), measured(rate=90.0)], path)
    assert history.read(path) == [measured(), measured("core"), measured(rate=90.0)]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    history.append([measured()], path)
    path.write_text(path.read_text() + '{"claim": "qu\n')
    with pytest.raises(SystemExit, match=r"history\.jsonl:2"):
        history.read(path)


def test_the_reference_is_the_median_of_the_last_trusted_ones_on_such_a_machine() -> None:
    past = [measured(rate=1000.0)] * 3 + [measured(rate=rate) for rate in (100, 104, 96, 98, 102)]
    past += [measured(rate=1.0, trusted=False), measured(rate=1.0, machine="elsewhere")]
    assert history.reference(past, "queue", "here") == {"rate": 100.0}
    assert history.reference(past, "queue", "nowhere") == {}


def test_a_trusted_measurement_is_shown_before_a_newer_doubtful_one() -> None:
    doubtful = measured(rate=1.0, trusted=False)
    assert history.newest([measured(), doubtful])["queue"] == measured()
    assert history.newest([doubtful])["queue"] == doubtful
    assert history.newest([doubtful, measured()])["queue"] == measured()


def test_the_age_of_a_commit_that_left_the_history_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        ran = subprocess.run(
            ["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return ran.stdout.strip()

    def commit(subject: str) -> str:
        git("commit", "--quiet", "--allow-empty", "-m", subject)
        return git("rev-parse", "--short=10", "HEAD")

    monkeypatch.setattr(history, "ROOT", tmp_path)
    git("init", "--quiet")
    first = commit("first")
    squashed = [commit(f"to be squashed {number}") for number in range(3)]
    git("reset", "--quiet", "--hard", first)
    commit("one instead of three")
    head = commit("newest")
    assert history.commits_since(first) == history.commits_since(first + "+") == 2
    assert history.commits_since(head) == 0
    assert [history.commits_since(each) for each in squashed] == [None] * 3  # git has them still
    assert history.commits_since("0123456789") is None
    assert history.commits_since("unknown") is None

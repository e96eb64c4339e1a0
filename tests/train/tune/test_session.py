"""A small search with real ranks, its journal, and what it writes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec
import pytest

from phalanx.config import ConfigError, load_job
from tests.commands import run_phalanx

JOB = """\
# A job with bad settings.
name = "slow"

[model]
preset = "tiny"
dim = 64
layers = 1
ffn = 128
vocab = 256

[data]
sequence = 32

[precision]
compute = "float32"

[train]
global_batch = 8
micro_batch = 1  # too few
device = "cpu"

[memory]
recompute = "full"
"""


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a search that has run to its end."""
    folder = tmp_path_factory.mktemp("tune")
    (folder / "job.toml").write_text(JOB)
    called(folder)
    return folder


def called(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    asked = ["--json", "--trials", "8", "--minutes", "10", "--folder", "search"]
    return run_phalanx("tune", "job.toml", *asked, "--write", "tuned.toml", *options, folder=folder)


def test_a_search_measures_real_steps_and_writes_a_job_that_loads(searched: Path) -> None:
    lines = (searched / "search" / "trials.jsonl").read_bytes().splitlines()
    trials = [msgspec.json.decode(line) for line in lines]
    assert 2 <= len(trials) <= 8
    assert trials[0]["phase"] == "baseline" and trials[0]["values"]["train.micro_batch"] == 1
    assert any(trial["values"]["train.micro_batch"] > 1 for trial in trials)
    assert all(seconds > 0 for trial in trials for seconds in trial["step_seconds"])
    tuned, job = load_job(searched / "tuned.toml"), load_job(searched / "job.toml")
    assert tuned.train.global_batch == job.train.global_batch and tuned.model == job.model
    assert "# A job with bad settings." in (searched / "tuned.toml").read_text()


def test_the_same_command_goes_on_where_the_journal_ends(searched: Path) -> None:
    journal = searched / "search" / "trials.jsonl"
    before = journal.read_bytes()
    done = called(searched)
    assert done.returncode == 0, done.stderr
    assert journal.read_bytes() == before
    report = msgspec.json.decode(done.stdout)
    assert len(report["trials"]) == len(before.splitlines())
    assert set(report["changes"]) <= set(report["before"])


def test_a_journal_of_another_question_is_refused(searched: Path) -> None:
    done = called(searched, "--set", "train.global_batch=16")
    assert done.returncode == 2
    assert "another job" in done.stdout


def test_a_half_written_line_is_no_trial(tmp_path: Path) -> None:
    from phalanx.train.tune.session import TrialJournal

    journal = TrialJournal(tmp_path, b"question\n")
    (tmp_path / "trials.jsonl").write_bytes(b'{"number": 0, "pha')
    assert journal.trials() == []
    with pytest.raises(ConfigError, match="another job"):
        TrialJournal(tmp_path, b"other\n")

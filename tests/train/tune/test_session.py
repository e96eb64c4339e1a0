"""A small search with real ranks, its journal, and what it writes."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from phalanx.config import ConfigError, job_from_table, load_job
from phalanx.plan.tune.settings import TunedMachine, settings_of
from phalanx.plan.tune.trials import Phase, Trial
from phalanx.train.tune import session
from phalanx.train.tune.session import TrialJournal, TuneRequest
from phalanx.train.tune.trial import Interrupted, TrialResult
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
    journal = TrialJournal(tmp_path, b"question\n")
    (tmp_path / "trials.jsonl").write_bytes(b'{"number": 0, "pha')
    assert journal.trials() == []
    with pytest.raises(ConfigError, match="another job"):
        TrialJournal(tmp_path, b"other\n")


def journal_of(folder: Path, *lines: bytes) -> TrialJournal:
    journal = TrialJournal(folder, b"question\n")
    (folder / "trials.jsonl").write_bytes(b"".join(lines))
    return journal


WHOLE = msgspec.json.encode(Trial(number=0, phase=Phase.BASELINE, values={}, took_seconds=1.0))


def test_a_journal_with_a_damaged_line_says_where(tmp_path: Path) -> None:
    journal = journal_of(tmp_path, WHOLE + b"\n", b"\0\0\0\n", WHOLE + b"\n")
    with pytest.raises(ConfigError, match=r"line 2 .*--fresh"):
        journal.trials()


def test_whole_trials_stay_when_the_search_is_killed_as_it_cuts_a_half_one_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = journal_of(tmp_path, WHOLE + b"\n", WHOLE[:20])
    written: list[int] = []
    for name in ("write_bytes", "write_text"):  # these empty the file before they fill it
        monkeypatch.setattr(Path, name, lambda *_: written.append(1))
    assert len(journal.trials()) == 1 and not written
    assert (tmp_path / "trials.jsonl").read_bytes() == WHOLE + b"\n"


@pytest.mark.parametrize("change", [{"cores": 64}, {"cuda": True}])
def test_trials_of_another_machine_are_not_gone_on_with(
    tmp_path: Path, change: dict[str, int]
) -> None:
    job = job_from_table(tomllib.loads(JOB))
    request = TuneRequest(job=job, ranks=1, folder=tmp_path)
    here = TunedMachine(cuda=False, cores=4, ranks=1)
    there = structs.replace(here, **change)
    TrialJournal(tmp_path, session._question(request, here, settings_of(job, here)))
    TrialJournal(tmp_path, session._question(request, here, settings_of(job, here)))
    with pytest.raises(ConfigError, match="another job, machine"):
        TrialJournal(tmp_path, session._question(request, there, settings_of(job, there)))


def test_a_folder_has_one_search_at_a_time(tmp_path: Path) -> None:
    job = job_from_table(tomllib.loads(JOB))
    request = TuneRequest(job=job, ranks=1, folder=tmp_path)

    def second(*_: object) -> TrialResult:
        with pytest.raises(ConfigError, match="another search"):
            session.tune(request, runner=second)
        raise Interrupted

    with pytest.raises(Interrupted):
        session.tune(request, runner=second)

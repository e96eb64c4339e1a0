"""A sweep that a job drives: what the job gets, and what it says of the sweep's end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from phalanx.cluster.jobs.job import JobState
from phalanx.control.client import sweep_driver, sweep_run
from phalanx.control.client.client import Client, ClientError
from phalanx.control.client.sweep_driver import decode_sweep_order, driver_job, driver_name, main
from phalanx.control.client.sweep_run import SweepRun, unfinished
from phalanx.control.wire.api_types import Submission, TrialOut
from phalanx.control.wire.payload import Script
from phalanx.plan.sweeps.rules import check_sweep
from tests.control.client.test_sweep_run import JOB, SWEEP, PlayedServer

RANGES = '[parameters."optimizer.weight_decay"]\nvalues = [0, 0.1, 1]\n'


@pytest.fixture
def submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Submission:
    """The job of a sweep, of whoever has a token in a file."""
    monkeypatch.setattr(sweep_run.time, "sleep", lambda seconds: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PHALANX_TOKEN", raising=False)
    Path("mine").write_text("secret\n")
    monkeypatch.setenv("PHALANX_TOKEN_FILE", "mine")
    Path("job.toml").write_text(JOB)
    Path("sweep.toml").write_text(SWEEP + RANGES)
    client = Client("http://one:1,http://two:2", tmp_path)
    return driver_job(client, check_sweep(Path("sweep.toml")), at_once=5, confirmed=True)


def word_of(made: Submission) -> str:
    assert isinstance(made.work, Script)
    return made.work.argv[-1]


def test_the_job_drives_the_sweep_as_the_file_was_and_reaches_the_server_by_a_token_file(
    submitted: Submission, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = check_sweep(Path("sweep.toml"))
    Path("sweep.toml").unlink()
    order, same = decode_sweep_order(word_of(submitted))
    assert (same, order.at_once, order.confirmed) == (plan, 5, True)
    assert submitted.spec.name == driver_name(plan.key) and submitted.spec.gang.slot_gpus == 0
    assert submitted.work.folder == str(tmp_path)
    assert submitted.work.environment == {
        "PHALANX_SERVER": "http://one:1,http://two:2",
        "PHALANX_TOKEN_FILE": str(tmp_path / "mine"),
    }
    monkeypatch.setenv("PHALANX_TOKEN", "secret")
    with pytest.raises(ClientError, match="put it into a file"):
        driver_job(Client("http://one:1"), plan, at_once=0, confirmed=False)
    with pytest.raises(ValueError, match="is not a sweep"):
        decode_sweep_order("x")


def drive(server: PlayedServer, made: Submission, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sweep_driver, "Client", lambda: server)
    return main([word_of(made)])


def test_a_sweep_that_ends_or_that_somebody_stops_is_not_begun_again_and_a_lost_one_is(
    submitted: Submission, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server, plan = PlayedServer(1), decode_sweep_order(word_of(submitted))[1]
    assert drive(server, submitted, monkeypatch) == 0
    assert "every trial has ended" in capsys.readouterr().out
    trials = list(server.jobs.values())
    assert not unfinished(plan, trials) and unfinished(plan, trials[:-1])
    begun = [structs.replace(each, state=JobState.RUNNING) for each in trials]
    assert unfinished(plan, begun[:2])

    def cancels(self: SweepRun) -> Any:
        raise sweep_run.SweepStopped("trial 3 (job 4) was cancelled")

    silent = PlayedServer()
    silent.value = lambda trial: None  # type: ignore[assignment, return-value]
    assert drive(silent, submitted, monkeypatch) == 1
    assert "none reported loss" in capsys.readouterr().err
    monkeypatch.setattr(SweepRun, "run", cancels)
    assert drive(PlayedServer(), submitted, monkeypatch) == 0
    assert "stopped: trial 3" in capsys.readouterr().out


def test_a_sweep_with_a_cancelled_trial_is_unfinished(submitted: Submission) -> None:
    plan, server = decode_sweep_order(word_of(submitted))[1], PlayedServer(2)
    SweepRun(server, plan).run()  # type: ignore[arg-type]
    trials: list[TrialOut] = list(server.jobs.values())
    trials[-1] = structs.replace(trials[-1], state=JobState.CANCELLED)
    assert unfinished(plan, trials)

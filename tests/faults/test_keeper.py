"""A keeper that stands still, or is killed again and again."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from phalanx.checkpoint.write.deadline import LEAST_SECONDS
from tests.control.jobs import undisturbed
from tests.faults.trial import SHORT_STEPS, Process, Trial, trial_cluster


def notices(trial: Trial) -> list[str]:
    """Codes of what people were told about the job's keepers."""
    codes = [notice["code"] for notice in trial.notices()]
    return [code for code in codes if code.startswith("keeper_")]


def test_training_goes_on_while_a_keeper_stands_still_and_has_snapshots_again_after(
    tmp_path: Path,
) -> None:
    expected = undisturbed(tmp_path, SHORT_STEPS)
    with trial_cluster(tmp_path, spares=0) as cluster:
        trial = Trial(cluster, tmp_path, steps=SHORT_STEPS)
        trial.reach(5)
        keeper = trial.pid(Process.KEEPER)
        os.kill(keeper, signal.SIGSTOP)
        before, began = trial.step, time.monotonic()
        # Steps are made, although no snapshot of them is safe: training waits once, then no more.
        trial.wait(lambda: trial.made >= before + 5, "steps without snapshots")
        assert time.monotonic() - began < 4.5 * LEAST_SECONDS, "not once for each of them"
        assert trial.step <= before + 2
        trial.wait(lambda: "keeper_silent" in notices(trial), "a notice")
        os.kill(keeper, signal.SIGCONT)
        trial.reach(min(trial.made + 3, SHORT_STEPS - 10))
        trial.wait(lambda: "keeper_answers" in notices(trial), "a notice")
        assert cluster.job(trial.job)["generation"] == 1
        trial.ends_like(expected)
        trial.leaves_nothing()


@pytest.mark.soak
def test_a_keeper_that_stays_stopped_is_replaced(tmp_path: Path, expected: Path) -> None:
    with trial_cluster(tmp_path, spares=0) as cluster:
        trial = Trial(cluster, tmp_path, steps=600)
        trial.reach(5)
        os.kill(trial.pid(Process.KEEPER), signal.SIGSTOP)
        trial.wait(lambda: trial.commits.first_after(1), "a new keeper and snapshots", 60)
        assert notices(trial) == ["keeper_silent", "keeper_replaced"]
        cluster.command("cancel", str(trial.job))


@pytest.mark.soak
def test_a_keeper_that_is_killed_six_times_costs_no_retries(tmp_path: Path, expected: Path) -> None:
    with trial_cluster(tmp_path, spares=0) as cluster:
        trial = Trial(cluster, tmp_path)
        trial.reach(5)
        for number in range(6):
            generation = cluster.job(trial.job)["generation"]
            trial.kill(Process.KEEPER, slot=number % 4)
            trial.wait(lambda at=generation: trial.commits.first_after(at), "recovery", 60)
        assert cluster.job(trial.job)["retries_used"] == 0, trial.story()
        trial.ends_like(expected)
        trial.leaves_nothing()

"""Two and three faults in quick succession, and orders of people among them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from phalanx.testing.ports import free_port
from tests.control.jobs import losses, undisturbed
from tests.faults.test_combinations import lost_steps
from tests.faults.trial import SHORT_STEPS, Phase, Process, Trial, trial_cluster

pytestmark = pytest.mark.soak
GOES_ON_SECONDS = 60.0  # on a busy machine
ENDLESS = 10**6  # steps
PACE_SECONDS = 0.3


def test_a_worker_dies_while_its_agent_stands_still(tmp_path: Path, short: Path) -> None:
    with trial_cluster(tmp_path) as cluster:
        trial = Trial(cluster, tmp_path, steps=SHORT_STEPS)
        trial.reach(5)
        before = trial.step
        trial.stop(Process.AGENT, 8.0)
        os.kill(trial.pid(Process.WORKER), signal.SIGKILL)
        trial.goes_on(GOES_ON_SECONDS)
        assert not lost_steps(trial, before)
        trial.ends_like(short)
        trial.leaves_nothing()


def test_a_keeper_dies_while_a_gang_restores_and_then_the_server(
    tmp_path: Path, short: Path
) -> None:
    with trial_cluster(tmp_path) as cluster:
        trial = Trial(cluster, tmp_path, steps=SHORT_STEPS)
        with trial.phase(Phase.RESTORING):
            before = trial.step
            trial.kill(Process.KEEPER)
            trial.kill(Process.SERVER)
        trial.goes_on(GOES_ON_SECONDS)
        lost_steps(trial, before)
        trial.ends_like(short)
        trial.leaves_nothing()


def test_server_and_keeper_die_while_a_checkpoint_is_committed(tmp_path: Path, short: Path) -> None:
    with trial_cluster(tmp_path) as cluster:
        trial = Trial(cluster, tmp_path, steps=SHORT_STEPS)
        with trial.phase(Phase.FLUSHING):
            before, keeper = trial.step, trial.pid(Process.KEEPER)
            trial.kill(Process.SERVER)
            os.kill(keeper, signal.SIGKILL)
        trial.goes_on(GOES_ON_SECONDS)
        lost_steps(trial, before)
        trial.ends_like(short)
        trial.leaves_nothing()


def test_a_worker_its_keeper_and_the_agent_of_its_neighbour(tmp_path: Path, short: Path) -> None:
    with trial_cluster(tmp_path) as cluster:
        trial = Trial(cluster, tmp_path, steps=SHORT_STEPS)
        trial.reach(5)
        before = trial.step
        worker, keeper = trial.pid(Process.WORKER), trial.pid(Process.KEEPER)
        trial.kill(Process.AGENT, slot=2)
        os.kill(worker, signal.SIGKILL)
        time.sleep(0.5)
        os.kill(keeper, signal.SIGKILL)
        trial.goes_on(GOES_ON_SECONDS)
        lost_steps(trial, before)
        trial.ends_like(short)
        trial.leaves_nothing()


def test_a_node_comes_back_with_old_state_while_its_spare_trains(
    tmp_path: Path, short: Path
) -> None:
    """Its disk is that of some steps before; as the spare it uses nothing of that."""
    with trial_cluster(tmp_path) as cluster:
        trial = Trial(cluster, tmp_path, steps=SHORT_STEPS)
        trial.reach(4)
        old, other = trial.node(1), trial.node(2)
        copy = shutil.copytree(old.state, tmp_path / "old", symlinks=True)
        trial.reach(8)
        before = trial.step
        cluster.kill_node(old)
        trial.goes_on(GOES_ON_SECONDS)
        shutil.rmtree(old.state)
        shutil.copytree(copy, old.state, symlinks=True)
        shutil.rmtree(copy)
        cluster.restart_node(old)
        trial.wait(cluster.readmit, "the old node to be let in", 120)
        cluster.kill_node(other)
        trial.goes_on(GOES_ON_SECONDS)
        assert not lost_steps(trial, before)
        assert old.name in cluster.job(trial.job)["nodes"], trial.story()
        cluster.restart_node(other)
        trial.ends_like(short)
        trial.leaves_nothing()


def test_a_second_server_on_the_same_state_is_refused_and_harms_nobody(
    tmp_path: Path, short: Path
) -> None:
    with trial_cluster(tmp_path) as cluster:
        trial = Trial(cluster, tmp_path, steps=SHORT_STEPS)
        trial.reach(5)
        command = [sys.executable, "-m", "phalanx", "up", "--state", str(cluster.state)]
        command += ["--port", str(free_port())]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
        assert "a server already runs on" in done.stderr
        trial.kill(Process.WORKER)
        trial.goes_on(GOES_ON_SECONDS)
        trial.kill(Process.SERVER)
        trial.ends_like(short)
        trial.leaves_nothing()


def test_a_drain_a_killed_server_and_a_cancel(tmp_path: Path) -> None:
    with trial_cluster(tmp_path) as cluster:
        trial = Trial(cluster, tmp_path, steps=SHORT_STEPS)
        trial.reach(5)
        cluster.command("drain", str(trial.job))
        trial.kill(Process.SERVER)
        trial.wait(lambda: trial.state, "a server")
        cluster.command("cancel", str(trial.job))
        assert cluster.wait_ended(trial.job, GOES_ON_SECONDS) == "cancelled", trial.story()
        trial.wait(trial.healed, "everything to be started again")
        trial.leaves_nothing()


def test_another_mapping_and_a_killed_server(tmp_path: Path) -> None:
    """The change is carried out or given up; no sample is left out, and no loss is another."""
    constant = "schedule.kind=constant"
    expected = undisturbed(tmp_path, 160, constant)
    with trial_cluster(tmp_path) as cluster:
        trial = Trial(cluster, tmp_path, constant, steps=ENDLESS)
        cluster.pace(trial.job, PACE_SECONDS)
        trial.reach(5)
        before = trial.step
        asked = ("--set", "parallel.pipeline=1", "--set", "parallel.data=4", "--apply")
        cluster.command("replan", str(trial.job), *asked)
        trial.kill(Process.SERVER)
        trial.wait(trial.healed, "everything to be started again")
        trial.goes_on(GOES_ON_SECONDS)
        trial.reach(before + 12)
        lost_steps(trial, before)
        trial.ends_cancelled()
        agree(trial, expected)


def test_another_size_and_killed_workers(tmp_path: Path) -> None:
    constant = "schedule.kind=constant"
    expected = undisturbed(tmp_path, 160, constant)
    with trial_cluster(tmp_path) as cluster:
        trial = Trial(cluster, tmp_path, constant, steps=ENDLESS, options=("--least", "1"))
        cluster.pace(trial.job, PACE_SECONDS)
        trial.reach(5)
        before = trial.step
        cluster.command("scale", str(trial.job), "1")
        trial.kill(Process.WORKER)
        trial.wait(trial.healed, "everything to be started again")
        trial.wait(lambda: cluster.job(trial.job)["replicas"] == 1, "a smaller gang")
        made = trial.made
        trial.wait(lambda: trial.made >= made + 5, "steps of the smaller gang", GOES_ON_SECONDS)
        with suppress(AssertionError):  # one that is on its way to two replicas may still be at one
            trial.kill(Process.WORKER)
        cluster.wait(lambda: trial.healed() and trial.state, "a server")
        cluster.command("scale", str(trial.job), "2")
        trial.wait(lambda: cluster.job(trial.job)["replicas"] == 2, "the gang of before")
        trial.goes_on(GOES_ON_SECONDS)
        lost_steps(trial, before)
        trial.ends_cancelled()
        agree(trial, expected)


def agree(trial: Trial, expected: Path) -> None:
    """The losses of all steps are those of the undisturbed run, up to the order of sums."""
    made, known = losses(trial.folder), losses(expected)
    assert list(made) and sorted(made) == list(range(1, max(made) + 1))
    for step, loss in known.items():
        if step in made:
            assert made[step] == pytest.approx(loss, rel=1e-3), step

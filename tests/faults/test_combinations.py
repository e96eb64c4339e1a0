"""Several things at once, again and again, and disks that are full."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.control.jobs import losses, undisturbed
from tests.faults.trial import SLOTS, STEPS, Phase, Process, Trial, trial_cluster

pytestmark = pytest.mark.soak
ENDLESS = 10**6  # steps


def test_two_nodes_that_hold_each_others_replicas(tmp_path: Path, expected: Path) -> None:
    """What both held is lost: the job says how many steps, and goes on from its checkpoint."""
    with trial_cluster(tmp_path, spares=2) as cluster:
        trial = Trial(cluster, tmp_path)
        trial.wait(lambda: cluster.job(trial.job)["durable"] >= 40, "a checkpoint")
        trial.reach(50)
        nodes = [trial.node(0), trial.node(1)]
        before = trial.step
        for node in nodes:
            cluster.kill_node(node)
        trial.goes_on(90)
        assert lost_steps(trial, before), trial.story()
        for node in nodes:
            cluster.restart_node(node)
        trial.ends_like(expected)
        trial.leaves_nothing()


def test_all_keepers_during_a_flush(tmp_path: Path, expected: Path) -> None:
    with trial_cluster(tmp_path) as cluster:
        trial = Trial(cluster, tmp_path)
        with trial.phase(Phase.FLUSHING):
            for pid in [trial.pid(Process.KEEPER, slot) for slot in range(SLOTS)]:
                os.kill(pid, signal.SIGKILL)
            before = trial.step  # to find four keepers takes as long as some steps
        trial.goes_on(90)
        assert lost_steps(trial, before), trial.story()
        trial.ends_like(expected)
        trial.leaves_nothing()


def test_all_workers_at_once_lose_nothing(tmp_path: Path, expected: Path) -> None:
    with trial_cluster(tmp_path) as cluster:
        trial = Trial(cluster, tmp_path)
        trial.reach(20)
        before = trial.step
        for pid in [trial.pid(Process.WORKER, slot) for slot in range(SLOTS)]:
            os.kill(pid, signal.SIGKILL)
        trial.goes_on(40)
        assert not lost_steps(trial, before)
        trial.ends_like(expected)
        trial.leaves_nothing()


def test_the_server_together_with_a_node(tmp_path: Path, expected: Path) -> None:
    with trial_cluster(tmp_path) as cluster:
        trial = Trial(cluster, tmp_path)
        trial.reach(20)
        node, before = trial.node(1), trial.step
        cluster.kill_server()
        cluster.kill_node(node)
        cluster.start_server()
        trial.goes_on(40)
        assert not lost_steps(trial, before)
        cluster.restart_node(node)
        trial.ends_like(expected)
        trial.leaves_nothing()


def test_the_server_together_with_a_worker(tmp_path: Path, expected: Path) -> None:
    with trial_cluster(tmp_path) as cluster:
        trial = Trial(cluster, tmp_path)
        trial.reach(20)
        worker, before = trial.pid(Process.WORKER), trial.step
        cluster.kill_server()
        os.kill(worker, signal.SIGKILL)
        cluster.start_server()
        trial.goes_on(40)
        assert not lost_steps(trial, before)
        trial.ends_like(expected)
        trial.leaves_nothing()


def test_a_kill_every_three_seconds_does_not_end_a_job(tmp_path: Path, expected: Path) -> None:
    with trial_cluster(tmp_path) as cluster:
        trial = Trial(cluster, tmp_path)
        trial.reach(5)
        assert kill_every(trial, 3.0, 180) >= 5
        trial.ends_like(expected)
        trial.leaves_nothing()


@pytest.mark.timeout(1200)
def test_ten_minutes_of_kills_every_three_seconds_do_not_end_a_job(tmp_path: Path) -> None:
    """However few steps it makes: none of them differs, and no retry is spent."""
    constant = "schedule.kind=constant"  # of runs of different lengths, too
    expected = undisturbed(tmp_path, STEPS, constant)
    with trial_cluster(tmp_path) as cluster:
        trial = Trial(cluster, tmp_path, constant, steps=ENDLESS)
        trial.reach(5)
        kills, before = kill_every(trial, 3.0, 600), trial.step
        assert kills >= 60 and trial.state == "running", trial.story()
        trial.goes_on(90)
        assert trial.step > before and cluster.job(trial.job)["retries_used"] == 0, trial.story()
        made = losses(trial.folder)
        again = {step: loss for step, loss in losses(expected).items() if step in made}
        assert again and {step: made[step] for step in again} == again
        cluster.command("cancel", str(trial.job))
        assert cluster.wait_ended(trial.job, 60) == "cancelled"


def test_a_full_disk_for_checkpoints_is_borne(tmp_path: Path, expected: Path) -> None:
    (tmp_path / "runs").mkdir()
    with small_disk(tmp_path / "runs") as ballast, trial_cluster(tmp_path) as cluster:
        trial = Trial(cluster, tmp_path)
        trial.reach(5)
        fill(ballast)
        trial.reach(100)
        assert cluster.job(trial.job)["durable"] == 0
        ballast.unlink()
        trial.ends_like(expected)
        trial.leaves_nothing()


def test_a_full_disk_at_the_server_is_borne(tmp_path: Path, expected: Path) -> None:
    """Orders are refused, facts wait, and a worker that dies meanwhile is replaced after."""
    (tmp_path / "server").mkdir()
    with small_disk(tmp_path / "server") as ballast, trial_cluster(tmp_path) as cluster:
        trial = Trial(cluster, tmp_path)
        trial.reach(20)
        fill(ballast)
        at = trial.step
        trial.reach(at + 10)
        trial.kill(Process.WORKER)
        time.sleep(5.0)
        ballast.unlink()
        trial.goes_on(60)
        trial.ends_like(expected)
        trial.leaves_nothing()


def kill_every(trial: Trial, pause_seconds: float, seconds: float) -> int:
    """Kill a worker again and again until the job or the time is over; how many there were."""
    number, deadline = 0, time.monotonic() + seconds
    while trial.state in ("running", "forming", "") and time.monotonic() < deadline:
        time.sleep(pause_seconds)
        with suppress(AssertionError, TimeoutError, ProcessLookupError, KeyError, IndexError):
            trial.kill(Process.WORKER, slot=number % SLOTS)
            number += 1
    return number


def lost_steps(trial: Trial, committed: int) -> bool:
    """Whether a committed step had to be made again; then a notice says how many."""
    ready = [fact["step"] for fact in trial.cluster.events("GangReady", trial.job)]
    lost = committed - ready[-1]
    if len(ready) < 2 or lost <= 0:  # nothing was restored yet
        return False
    told = trial.notices()
    said = [int(notice["facts"]["steps"]) for notice in told if "steps" in notice["facts"]]
    assert any(abs(count - lost) <= 3 for count in said), (lost, told)
    return True


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A disk of its own for a folder, and a file in it to fill it with."""
    if os.getuid() != 0:
        pytest.skip("only root can mount a small disk")
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "phalanx-faults", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    try:
        yield folder / "ballast"
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)


def fill(ballast: Path) -> None:
    """No byte is free any more."""
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        size = 1 << 20
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2

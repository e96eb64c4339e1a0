"""Disks that are full, out of files, read-only or damaged, while other things fail too."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import pytest

from phalanx.checkpoint.format.folder import scan
from phalanx.checkpoint.format.manifest import MANIFEST_FILE
from tests.faults.test_combinations import fill, lost_steps, small_disk
from tests.faults.trial import SHORT_STEPS, STEPS, Phase, Process, Trial, trial_cluster

pytestmark = pytest.mark.soak
GOES_ON_SECONDS = 60.0  # on a busy machine
FILES = 4000  # of a file system that runs out of them


def remount(folder: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(folder)], check=True, capture_output=True)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nothing can be made or opened for writing below a folder; what is open stays open."""
    for options in (["--bind", str(folder)], ["-o", "remount,bind,ro"]):
        command = ["mount", *options, str(folder)]
        subprocess.run(command, check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, capture_output=True)


@contextmanager
def no_more_files(folder: Path) -> Iterator[None]:
    """Every inode of the disk that a folder is the root of is taken."""
    remount(folder, f"nr_inodes={FILES}")
    taken = folder / "taken"
    with suppress(OSError):
        taken.mkdir()
        for number in range(FILES):
            (taken / str(number)).touch()
    assert os.statvfs(folder).f_ffree == 0
    yield
    remount(folder, f"nr_inodes={100 * FILES}")


@pytest.mark.parametrize(("broken", "may_lose"), [(read_only, True), (no_more_files, False)])
def test_a_worker_that_dies_while_its_run_folder_takes_nothing_is_replaced_later(
    tmp_path: Path,
    short: Path,
    broken: Callable[[Path], AbstractContextManager[None]],
    may_lose: bool,
) -> None:
    """Whoever takes its place tries again where the run's folder cannot be opened."""
    (tmp_path / "runs").mkdir()
    with small_disk(tmp_path / "runs"), trial_cluster(tmp_path) as cluster:
        trial = Trial(cluster, tmp_path, steps=SHORT_STEPS)
        trial.reach(5)
        before = trial.step
        with broken(tmp_path / "runs"):
            trial.kill(Process.WORKER)
            time.sleep(6.0)
        trial.goes_on(GOES_ON_SECONDS)
        assert not lost_steps(trial, before) or may_lose
        trial.ends_like(short)
        trial.leaves_nothing()


def test_an_agent_that_cannot_start_again_on_its_full_disk_costs_at_most_its_node(
    tmp_path: Path, short: Path
) -> None:
    state = tmp_path / "local" / "nodes" / "node-1"
    state.mkdir(parents=True)
    with small_disk(state) as ballast, trial_cluster(tmp_path) as cluster:
        trial = Trial(cluster, tmp_path, steps=SHORT_STEPS)
        trial.reach(5)
        before = trial.step
        nodes = cluster.job(trial.job)["nodes"]
        slot = nodes.index("node-1") if "node-1" in nodes else 0
        fill(ballast)
        trial.kill(Process.AGENT, slot)
        trial.goes_on(GOES_ON_SECONDS)
        time.sleep(3.0)
        ballast.unlink()
        trial.wait(trial.healed, "everything to be started again")
        lost_steps(trial, before)
        trial.ends_like(short)
        trial.leaves_nothing()


def test_one_nodes_disk_fills_up_in_a_flush_while_its_buddy_dies(
    tmp_path: Path, short: Path
) -> None:
    disk = tmp_path / "disks" / "node-1"
    disk.mkdir(parents=True)
    own = f"checkpoint.local.path={tmp_path}/disks/$PHALANX_NODE"
    with small_disk(disk) as ballast, trial_cluster(tmp_path) as cluster:
        settings = (own, "checkpoint.local.every=6")
        trial = Trial(cluster, tmp_path, *settings, steps=SHORT_STEPS)
        trial.reach(5)
        before = trial.step
        fill(ballast)
        with trial.phase(Phase.FLUSHING):
            nodes = cluster.job(trial.job)["nodes"]
            buddy = cluster.node(nodes[(nodes.index("node-1") + 1) % 4])
            cluster.kill_node(buddy)
        trial.goes_on(GOES_ON_SECONDS)
        ballast.unlink()
        lost_steps(trial, before)
        cluster.restart_node(buddy)
        trial.ends_like(short)
        trial.leaves_nothing()


def spoil(manifest: Path, harm: str) -> None:
    data = manifest.read_bytes()
    if harm == "gone":
        manifest.unlink()
    elif harm == "flipped":
        manifest.write_bytes(data[:50] + bytes([data[50] ^ 4]) + data[51:])
    else:
        manifest.write_bytes(data[: len(data) // 2 if harm == "half" else 0])


@pytest.mark.parametrize("harm", ["half", "flipped"])
def test_after_a_power_failure_a_damaged_manifest_is_passed_over(
    tmp_path: Path, expected: Path, harm: str
) -> None:
    """The checkpoint before it is taken, and what that costs is said."""
    with trial_cluster(tmp_path) as cluster:
        trial = Trial(cluster, tmp_path, "checkpoint.keep=10", steps=STEPS)
        trial.reach(50)
        trial.wait(lambda: cluster.job(trial.job)["durable"] >= 80, "two checkpoints")
        before = trial.step
        cluster.kill_everything()
        whole = [each for each in scan(trial.folder / "checkpoints") if each.complete]
        for each in whole:
            if each.step > 40:
                spoil(each.path / MANIFEST_FILE, harm)
        cluster.restart_everything()
        trial.wait(lambda: len(cluster.events("GangReady", trial.job)) == 2, "it to go on", 120)
        ready = cluster.events("GangReady", trial.job)[-1]["step"]
        assert ready == 40
        # What was committed in the last second nobody had told the server, which died, too.
        (lost,) = [each["facts"] for each in trial.notices() if each["code"] == "given_up"]
        assert lost["first"] == 41 and 80 <= lost["last"] <= before
        trial.ends_like(expected)

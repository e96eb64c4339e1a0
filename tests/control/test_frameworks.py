"""Scripts of other libraries run to their end, unchanged, though a rank and a node are killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from phalanx.testing.local_cluster import TrialCluster
from phalanx.testing.local_processes import worker_pids
from tests.control.programs import (
    LIBRARIES,
    PYTHON,
    SILENT,
    SILENT_SECONDS,
    TORCHRUN,
    VARIABLES,
    Program,
    prepare,
)

# A program goes elsewhere when its node has been silent for nine seconds, not for twenty-one.
PROMPT = "[timeouts]\nheartbeat_ns = 2_000_000_000\n"


class Trial:
    """One program in a folder of its own, killed twice."""

    def __init__(self, cluster: TrialCluster, name: str, *command: str, ranks: int = 2) -> None:
        self.cluster, self.folder = cluster, cluster.root / name
        prepare(self.folder)
        options = ("--world-size", str(ranks), "--workdir", str(self.folder), *VARIABLES)
        self.job = cluster.submit(*options, "--", *command)

    def reach(self) -> None:
        """Wait until it is in the middle of its run."""
        reached = self.folder / "reached"
        self.cluster.wait(reached.exists, f"the middle of {self.folder.name}", 240)

    def kill_rank(self) -> None:
        """Kill one of its processes; it starts again."""
        pids = worker_pids(self.cluster.node_of(0, self.job), self.job)
        os.kill(pids[max(pids)], signal.SIGKILL)
        again = lambda: self.cluster.job(self.job)["generation"] > 1  # noqa: E731
        self.cluster.wait(again, "the next generation", 60)
        (self.folder / "reached").unlink(missing_ok=True)

    def let_go(self) -> None:
        """Nobody kills it any more."""
        (self.folder / "kill-me").unlink()

    def check(self, *words: str, seconds: float = 240) -> None:
        """It has done all that it was to do, and began where it was."""
        assert self.cluster.wait_ended(self.job, seconds) == "done", self.output()
        assert self.cluster.job(self.job)["generation"] >= 3
        assert self.cluster.job(self.job)["retries_used"] == 0
        for each in words:
            assert each in self.output()

    def output(self) -> str:
        found = self.cluster.root.glob(f"local/nodes/*/jobs/{self.job}/worker-*.log")
        return "\n".join(path.read_text() for path in found)


def kill_twice(cluster: TrialCluster, *trials: Trial) -> None:
    """Kill a rank of each, then the nodes that they run on."""
    for trial in trials:
        trial.reach()
        trial.kill_rank()
    for trial in trials:
        trial.reach()
    held = {cluster.node_of(0, trial.job).name for trial in trials}
    for name in held:
        cluster.kill_node(cluster.node(name))
    for trial in trials:
        trial.let_go()
    if len(held) == len(cluster.local.nodes):
        cluster.restart_node(cluster.node(name))


def test_programs_whose_rank_and_node_were_killed_run_to_their_end(tmp_path: Path) -> None:
    with TrialCluster(tmp_path, nodes=2, gpus_per_node=5, policy=PROMPT) as cluster:
        plain = Trial(cluster, "plain", *PYTHON, "plain_ddp.py")
        launched = Trial(cluster, "launched", *TORCHRUN, "plain_ddp.py")
        shell = Trial(cluster, "shell", "sh", "-c", SILENT.format(3), ranks=1)
        kill_twice(cluster, plain, launched, shell)
        plain.check("begins after step 10", "ends at step 20")
        launched.check("begins after step 10", "ends at step 20")
        shell.check("begins after 0", "begins after 1", "ends")
        assert cluster.events("NoProgress", shell.job) == []


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("program", LIBRARIES)
def test_a_script_whose_rank_and_node_were_killed_runs_to_its_end(
    program: Program, tmp_path: Path
) -> None:
    command = program.command
    with TrialCluster(tmp_path, nodes=2, gpus_per_node=2) as cluster:
        trial = Trial(cluster, "trial", *command)
        kill_twice(cluster, trial)
        trial.check(program.resumed, program.ended, seconds=600)
        if "hf_trainer.py" in command:  # its steps are read from what it prints
            ended = cluster.job(trial.job)
            assert ended["printed"] and (ended["step"], ended["steps"]) == (20, 20)
        if "lightning_fit.py" in command:  # its callback reports them
            assert cluster.job(trial.job)["step"] == 20
        if "torchtitan.train" in command:  # it prints them, and not how many there are
            ended = cluster.job(trial.job)
            assert ended["printed"] and ended["step"] == 20


@pytest.mark.soak
@pytest.mark.timeout(4 * SILENT_SECONDS)
def test_a_shell_script_with_a_long_silent_phase_comes_back_and_runs_to_its_end(
    tmp_path: Path,
) -> None:
    with TrialCluster(tmp_path, nodes=2) as cluster:
        trial = Trial(cluster, "silent", "sh", "-c", SILENT.format(SILENT_SECONDS), ranks=1)
        trial.reach()
        time.sleep(SILENT_SECONDS / 8)
        kill_twice(cluster, trial)
        trial.check("begins after 0", "begins after 1", "ends", seconds=2 * SILENT_SECONDS)
        assert cluster.events("NoProgress", trial.job) == []

"""A job's trials: the undisturbed run, then plan after plan on one cluster, and the verdict."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from msgspec import Struct, structs

from phalanx.config import Job, to_toml
from phalanx.control.client.client import ClientError
from phalanx.testing.chaos.injector import JobFaults
from phalanx.testing.chaos.plan import ChaosPlan
from phalanx.testing.chaos.verdict import (
    belonging,
    compare,
    leaked_memory,
    leaked_ports,
    listening,
    losses,
    open_names,
    orphans,
    shared_memory,
)
from phalanx.testing.local_cluster import TrialCluster

END_SECONDS = 300.0  # for a job of a trial, however it is disturbed
HEAL_SECONDS = 120.0
LEASE_SECONDS = 150.0  # that a keeper may outlive a job whose agent was away: see POLICY
DISK_BYTES = 512 << 20
POLICY = """
[spares]
nodes = {spares}
[timeouts]
heartbeat_ns = 1000000000
round_trip_ns = 500000000
least_hang_ns = 10000000000
[health]
# Nodes die here for a living: none of them is a lemon, and nobody is asked.
breaker_least_nodes = 1000000
strikes = 1000000
lemon_score = 1000000000
false_alarms_per_week = 1000000
[recovery]
room_retry_ns = 1000000000
"""

log = logging.getLogger("phalanx.chaos")


class ChaosOutcome(Struct, kw_only=True):
    """What became of a job under a plan."""

    plan: str
    done: list[str]  # faults, as they were done
    state: str
    seconds: float
    generations: int
    steps: int
    differences: list[str]  # to the undisturbed run
    left_over: list[str]  # of the job, after its end

    @property
    def good(self) -> bool:
        """Nothing is lost, nothing differs, nothing stayed."""
        return self.state == "done" and not self.differences and not self.left_over


class ChaosCluster:
    """A cluster on this machine; ``leaks`` are known when it was left."""

    def __init__(
        self,
        root: Path,
        job: Job,
        ranks: int,
        *,
        spares: int = 1,
        plans: Sequence[ChaosPlan] = (),
        namespaces: bool = False,
    ) -> None:
        self.root, self.ranks = root, ranks
        self.job = structs.replace(
            job,
            runs=str(root / "runs"),
            data=structs.replace(job.data, path=_absolute(job.data.path)),
            train=structs.replace(job.train, deterministic=True),
            log=structs.replace(job.log, every=1),
        )
        self.leaks: list[str] = []
        self._before = shared_memory()
        self._ports: dict[int, int] = {}
        policy = POLICY.format(spares=spares)
        self.runs = root / "runs"
        self._own_disk = any(action.do == "fill_disk" for plan in plans for action in plan.actions)
        self.cluster = TrialCluster(
            root / "stage", nodes=ranks, spares=spares, policy=policy, namespaces=namespaces
        )
        self.undisturbed = root

    def __enter__(self) -> ChaosCluster:
        os.environ["PHALANX_CHAOS"] = "1"  # workers take orders of faults
        self.runs.mkdir(exist_ok=True)
        if self._own_disk:
            self._own_disk = mount_disk(self.runs)
        try:
            self.undisturbed = self._run_undisturbed()
            self.cluster.__enter__()
        except BaseException:
            self._unmount()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: object, trace: TracebackType | None
    ) -> None:
        self._ports |= listening(belonging(self.root))
        self.cluster.__exit__()
        os.environ.pop("PHALANX_CHAOS", None)
        self.leaks += orphans(self.root)
        self.leaks += leaked_ports(self._ports)
        self.leaks += leaked_memory(self._before)
        self._unmount()

    def _unmount(self) -> None:
        if self._own_disk:
            subprocess.run(["umount", "-l", str(self.runs)], check=False, capture_output=True)

    def _write(self, name: str) -> Path:
        path = self.root / f"{name}.toml"
        path.write_text(to_toml(structs.replace(self.job, name=name)))
        return path

    def _run_undisturbed(self) -> Path:
        command = [sys.executable, "-m", "phalanx", "train", str(self._write("undisturbed"))]
        command += ["--world-size", str(self.ranks)]
        done = subprocess.run(command, cwd=self.root, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the undisturbed run failed: {done.stdout}{done.stderr}")
        (folder,) = (self.root / "runs" / "undisturbed").iterdir()
        return folder

    def play(self, plan: ChaosPlan) -> ChaosOutcome:
        """Submit the job, do what the plan says, wait for its end, and look."""
        began = time.monotonic()
        cluster, steps = self.cluster, self.job.train.steps
        number = cluster.submit(str(self._write("disturbed")), "--world-size", str(self.ranks))
        faults = JobFaults(cluster, number, self.runs if self._own_disk else None)
        commits = cluster.commits(number, self.ranks)
        waiting = list(plan.actions)
        state = "lost"
        deadline = began + END_SECONDS
        while time.monotonic() < deadline:
            newest = commits.newest()
            at = newest.step if newest is not None else 0
            while waiting and at >= waiting[0].at_step:
                self._ports |= listening(belonging(self.root))
                faults.do(waiting.pop(0))
            faults.due()
            state = self._state(number) or state
            if state == "pending":  # the gang lacks nodes: people would look at those put aside
                self.cluster.readmit()
            if state in ("done", "failed", "cancelled"):
                break
            time.sleep(0.05)
        faults.heal()
        state = self._state(number) or state
        faults.done += [f"{action}: left out, the job was done before" for action in waiting]
        folder = self.root / "runs" / "disturbed" / f"job-{number}"
        differences = self._differences(folder) if state == "done" else [f"it is {state}"]
        outcome = ChaosOutcome(
            plan=plan.name,
            done=faults.done,
            state=state,
            seconds=time.monotonic() - began,
            generations=int(cluster.job(number)["generation"]),
            steps=steps,
            differences=differences,
            left_over=self._left_over(number),
        )
        self._heal()
        return outcome

    def _state(self, number: int) -> str:
        with suppress(ClientError):  # the controller may be dead just now
            return str(self.cluster.job(number)["state"])
        return ""

    def _differences(self, folder: Path) -> list[str]:
        made = losses(folder)
        missing = [step for step in range(1, self.job.train.steps + 1) if step not in made]
        return [f"step {step} is missing" for step in missing] + compare(folder, self.undisturbed)

    def _left_over(self, number: int) -> list[str]:
        """Processes of the job that outlive it."""
        deadline = time.monotonic() + LEASE_SECONDS
        while True:
            leaks = [
                f"{node.name}: process {pid} ({' '.join(open_names(pid, folder))})"
                for node in self.cluster.local.nodes
                for folder in [node.state / "jobs" / str(number)]
                for pid in belonging(folder)
            ]
            if not leaks or time.monotonic() > deadline:
                return leaks
            time.sleep(0.1)

    def _heal(self) -> None:
        """All nodes are there and healthy before the next plan."""
        self.cluster.wait(self.cluster.readmit, "nodes to be whole again", HEAL_SECONDS)


def _absolute(path: str) -> str:
    """Paths of the job file hold wherever its runs are started."""
    return path if not path or "://" in path else str(Path(path).absolute())


Say = Callable[[str], None]


def play_all(cluster: ChaosCluster, plans: list[ChaosPlan], say: Say) -> list[ChaosOutcome]:
    """Plan after plan on one cluster; each is told as it ends."""
    outcomes = []
    for plan in plans:
        say(f"-- {plan.name}: {len(plan.actions)} faults")
        outcome = cluster.play(plan)
        for line in (*outcome.done, *outcome.differences[:3], *outcome.left_over):
            say(f"   {line}")
        word = "good" if outcome.good else "BAD"
        say(
            f"   {word}: {outcome.state} after {outcome.seconds:.0f} s, "
            f"{outcome.generations} generations, {len(outcome.differences)} differences, "
            f"{len(outcome.left_over)} processes left"
        )
        outcomes.append(outcome)
    return outcomes


def mount_disk(folder: Path) -> bool:
    """A small disk of its own for a folder; False where we may not."""
    if os.getuid() != 0:
        return False
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "phalanx-chaos", str(folder)]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0

"""A job that is harmed again and again: what is done, and how long until it commits steps again."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from phalanx.control.client.client import ClientError
from phalanx.testing.chaos.injector import JobFaults
from phalanx.testing.chaos.plan import Action, Kind
from phalanx.testing.local_cluster import Commit, TrialCluster

KINDS: dict[str, Kind] = {
    "worker": "kill_worker",
    "node": "kill_node",
    "keeper": "kill_keeper",
    "agent": "kill_agent",
    "controller": "kill_controller",
    "zygote": "kill_zygote",
    "stopped": "stop_worker",
}
# Workers do not notice these, so the generation goes on.
UNNOTICED = ("agent", "controller")
AWAY_SECONDS = 1.0  # until whoever supervises an agent, a node or a controller starts it again
FOR_GOOD_SECONDS = 1e6
RECOVERY_SECONDS = 180.0
SETTLED_STEPS = 3  # of its own, before the next fault
# Nodes die here for a living: none of them is a lemon, and nobody is asked.
HEALTH = """
[health]
breaker_least_nodes = 1000000
strikes = 1000000
lemon_score = 1000000000
false_alarms_per_week = 1000000
"""


class Struck(NamedTuple):
    """One fault and what came of it."""

    kind: str
    slot: int
    step: int  # the newest that was committed
    seconds: float  # until the next committed step
    detected: float  # until the log knew
    steps_again: int  # committed ones that were made again


class Target:
    """One job on a stage."""

    def __init__(self, cluster: TrialCluster, job: int, world: int) -> None:
        self.cluster, self.job, self.world = cluster, job, world
        self.commits = cluster.commits(job, world)
        self.faults = JobFaults(cluster, job)

    def strike(self, kind: str, slot: int) -> Struck:
        """Do it once the job has settled; whatever was killed is started again meanwhile."""
        self.settle()
        before, since = self._newest(), time.time_ns()
        seconds = FOR_GOOD_SECONDS if kind == "stopped" else AWAY_SECONDS
        self.faults.do(Action(do=KINDS[kind], at_step=1, slot=slot, seconds=seconds))
        after = self._recovered(kind, before)
        self._start_again()
        return Struck(
            kind=kind,
            slot=slot,
            step=before.step,
            seconds=after.at - self.faults.applied,
            detected=self._first_fact(since),
            steps_again=max(0, before.step - (after.step - 1)),
        )

    def settle(self) -> None:
        """Until everything runs, and the generation has made a few steps of its own."""
        self.wait(lambda: self.state == "running" or self.ended, "the job to run")
        if self.ended:
            raise RuntimeError(f"the job is {self.state} and not all faults were applied")
        generation = self.cluster.job(self.job)["generation"]
        self.wait(lambda: self.commits.first_after(generation - 1), "steps")
        first = self.commits.first_after(generation - 1)
        assert first is not None
        self.wait(lambda: self._newest().step >= first.step + SETTLED_STEPS, "steps")

    def wait(self, ready: Any, what: str, seconds: float = RECOVERY_SECONDS) -> None:
        """Wait; what was killed is started again when its time has come."""

        def healed() -> bool:
            self.faults.due()
            return bool(ready())

        self.cluster.wait(healed, what, seconds)

    @property
    def state(self) -> str:
        with suppress(ClientError):  # the controller may be dead just now
            return str(self.cluster.job(self.job)["state"])
        return ""

    def _newest(self) -> Commit:
        newest = self.commits.newest()
        assert newest is not None
        return newest

    def _recovered(self, kind: str, before: Commit) -> Commit:
        def found() -> Commit | None:
            if kind in UNNOTICED:
                return self.commits.next_after(before.step + 1)  # one may have been under way
            return self.commits.first_after(before.generation)

        self.wait(lambda: found() or self.ended, "recovery")
        after = found()
        assert after is not None, f"the job is {self.state}"
        return after

    @property
    def ended(self) -> bool:
        """Whether the job has."""
        return self.state in ("done", "failed", "cancelled")

    def _start_again(self) -> None:
        """Server and nodes are there again, as they would be for the next incident."""
        self.faults.heal()
        self.cluster.wait(self._whole, "nodes to be whole again", RECOVERY_SECONDS)

    def _whole(self) -> bool:
        """All nodes are there; one that is suspected of a hang stays with the job that it has."""
        with suppress(ClientError):
            self.cluster.readmit()
            held = self.cluster.job(self.job)["nodes"]
            return all(
                node["connected"]
                and (node["state"] in ("healthy", "spare") or node["name"] in held)
                for node in self.cluster.get("/v1/nodes")["nodes"]
            )
        return False

    def _first_fact(self, since_ns: int) -> float:
        """Seconds until the log knew of it; NaN where it never did."""
        kinds = ("WorkerExited", "NodeSilent", "NoProgress", "ControllerStarted")
        events = self.cluster.get("/v1/events?limit=200")["events"]
        found = [e["time_ns"] for e in events if e["kind"] in kinds and e["time_ns"] >= since_ns]
        return (min(found) - since_ns) / 1e9 if found else float("nan")


def summary(struck: Sequence[Struck]) -> dict[str, Any]:
    """Median and worst of some faults of one kind."""
    seconds = [each.seconds for each in struck]
    detected = [each.detected for each in struck if each.detected == each.detected]
    return {
        "recovered": len(struck),
        "median": statistics.median(seconds),
        "worst": max(seconds),
        "detected": statistics.median(detected) if detected else None,
        "detected_worst": max(detected, default=None),
        "steps_again": max(each.steps_again for each in struck),
        "seconds": seconds,
    }

"""What is counted while the world goes on, beside the core's own ledger."""

from __future__ import annotations

from statistics import median

from phalanx.cluster.jobs.job import ClusterJob, JobState
from phalanx.cluster.protocol.commands import Command, Form, Refuse
from phalanx.cluster.protocol.events import Event, Submit
from phalanx.cluster.state import View
from phalanx.cluster.units import HOUR_NS

SIZES = (1, 8, 64, 512, 1024, 4096, 16384)  # lower ends of the classes of job sizes

FAILURES_KEPT = 5


class SeedCounts:
    """Counts of one seed."""

    def __init__(self) -> None:
        self.interruptions: list[tuple[int, str, int]] = []  # (time, cause, GPUs of the job)
        self.node_faults: dict[int, int] = {}  # by node, whether a job was there or not
        self.failed_repairs = self.failed_starts = 0
        self.formations = 0
        self.submitted = 0
        self.steps = 0
        self.ended: dict[str, int] = {}  # jobs by how they ended
        self.refused: dict[str, int] = {}  # submissions by the reason why not
        self.failed: dict[str, int] = {}  # jobs by the code of the reason that they failed for
        self.failures: list[str] = []  # the first of them, in words
        self.rungs: dict[str, int] = {}
        self._generations: dict[int, int] = {}
        self._waits: list[int] = []
        self._down_ns: list[int] = []
        self._held_ns: dict[int, int] = {}  # by size: time that jobs held their nodes

    def count_node_faults(self, nodes: list[int]) -> None:
        """A fault took these nodes."""
        for node in nodes:
            self.node_faults[node] = self.node_faults.get(node, 0) + 1

    def ordered(self, event: Event, commands: list[Command], view: View) -> None:
        """An event was handled."""
        if isinstance(event.body, Submit):
            self.submitted += 1
        for command in commands:
            body = command.body
            if isinstance(body, Refuse) and isinstance(event.body, Submit):
                told = str(body.reason)
                self.refused[told] = self.refused.get(told, 0) + 1
            if not isinstance(body, Form):
                continue
            if body.generation <= self._generations.get(body.job, 0):
                continue  # said again, or spares are told to start
            self._generations[body.job] = body.generation
            self.formations += 1
            job = view.jobs[body.job]
            if body.generation == 1:
                self._waits.append(view.now_ns - job.submitted_ns)
            rung = str(body.reason.facts.get("rung", body.reason.code))
            self.rungs[rung] = self.rungs.get(rung, 0) + 1

    def recovered(self, down_ns: int) -> None:
        """A gang makes steps again after this long."""
        self._down_ns.append(down_ns)

    def left(self, job: ClusterJob, held_ns: int, step: int) -> None:
        """A job has held its nodes for this long, and keeps its steps up to this one."""
        size = _class(job.spec.gang.gpus(job.spec.gang.replicas))
        self._held_ns[size] = self._held_ns.get(size, 0) + held_ns
        self.steps = max(self.steps, step)
        if job.ended:
            self.ended[job.state] = self.ended.get(job.state, 0) + 1
            if job.state == JobState.FAILED:
                code = job.why.code
                self.failed[code] = self.failed.get(code, 0) + 1
                if len(self.failures) < FAILURES_KEPT:
                    self.failures.append(f"job {job.spec.name} failed: {job.why}")

    def mean_recovery_seconds(self) -> float:
        """From the last step before a stop to the first one after it."""
        return sum(self._down_ns) / len(self._down_ns) / 1e9 if self._down_ns else 0.0

    @property
    def recoveries(self) -> int:
        """Gangs that made steps again after a stop."""
        return len(self._down_ns)

    @property
    def held_ns(self) -> int:
        """How long jobs held nodes, all together."""
        return sum(self._held_ns.values())

    def median_wait_seconds(self) -> float:
        """From submission to the first start."""
        return median(self._waits) / 1e9 if self._waits else 0.0

    def longest_wait_seconds(self) -> float:
        """The longest of those."""
        return max(self._waits, default=0) / 1e9

    def mttf_hours(self) -> dict[str, float]:
        """Mean hours between unexpected faults of a job, by the GPUs of the job."""
        failures: dict[int, int] = {}
        for _, _, gpus in self.interruptions:
            failures[_class(gpus)] = failures.get(_class(gpus), 0) + 1
        return {
            f"{size}+": round(self._held_ns[size] / failures[size] / HOUR_NS, 3)
            for size in SIZES
            if failures.get(size) and self._held_ns.get(size)
        }


def _class(gpus: int) -> int:
    return max((least for least in SIZES if least <= gpus), default=1)

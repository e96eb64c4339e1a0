"""Drives a core by hand: numbers events, lets time pass, and answers as a healthy world would."""

from __future__ import annotations

from typing import TypeVar

from phalanx.cluster.core import Core
from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.jobs.job import ClusterJob, Expected, GangShape, JobSpec
from phalanx.cluster.node import Node
from phalanx.cluster.policy import Policy
from phalanx.cluster.protocol.commands import Command, Form, Restore
from phalanx.cluster.protocol.events import (
    ControllerStarted,
    Event,
    EventBody,
    GangDrained,
    GangJoined,
    GangReady,
    Progress,
    Submit,
    Tick,
)

SECOND = 10**9
B = TypeVar("B")

SHAPE = GangShape(replicas=2, tensor=8, slot_gpus=8, slot_cpus=8)
EXPECTED = Expected(step_ns=5 * SECOND, checkpoint_steps=100, checkpoint_ns=SECOND)


def fleet_of(count: int, per_leaf: int = 4, gpus: int = 8) -> Fleet:
    """Nodes n0, n1, … in leaves of a few, four leaves a pod."""
    return Fleet(
        Node(
            name=f"n{i}",
            gpus=gpus,
            kind="h100",
            features=("nvlink",),
            rails=8,
            leaf=f"leaf{i // per_leaf}",
            pod=f"pod{i // per_leaf // 4}",
        )
        for i in range(count)
    )


class Drive:
    """A core, its clock and its log."""

    def __init__(self, nodes: int = 8, policy: Policy | None = None, fleet: Fleet | None = None):
        self.core = Core(fleet or fleet_of(nodes), policy or Policy())
        self.now_ns = 0
        self.log: list[Event] = []
        self.sent: list[Command] = []

    def tell(self, body: EventBody, after_ns: int = 0) -> list[Command]:
        """Lets time pass (timers fire when they are due), then hands over an event."""
        self.wait(after_ns)
        return self._hand(body)

    def wait(self, passed_ns: int) -> None:
        """Lets time pass; every deadline of the core is met with a tick."""
        until = self.now_ns + passed_ns
        while (due := self.core.next_deadline_ns()) is not None and due <= until:
            self.now_ns = max(due, self.now_ns)
            self._hand(Tick())
        self.now_ns = until

    def take_over(self, down_ns: int) -> list[Command]:
        """No controller runs for a while, whatever falls due; then another one goes on."""
        self.now_ns += down_ns
        return self._hand(ControllerStarted(epoch=self.core.epoch + 1))

    def submit(self, **fields: object) -> ClusterJob:
        """Submits a job and lets the queue look at it."""
        spec = JobSpec(**{"name": "job", "gang": SHAPE, "expected": EXPECTED, **fields})
        first = self.core._ctx.next_job
        self.tell(Submit(spec=spec, request="r"))
        self.wait(SECOND)
        return self.core.view.jobs[first]

    def run(self, job: ClusterJob, step: int | None = None) -> None:
        """Brings a forming gang to run."""
        if job.gang.phase == "joining":
            known = job.committed if step is None else step
            had = job.step > 0 or job.durable > 0
            self.tell(
                GangJoined(job=job.id, generation=job.generation, step=known if had else -1),
                2 * SECOND,
            )
        self.tell(GangReady(job=job.id, generation=job.generation, step=job.gang.restored), SECOND)
        assert job.state == "running"

    def settle(self, job: ClusterJob) -> None:
        """Lets time pass until a gang that broke forms again, or the job has ended."""
        while not job.ended and job.gang.phase == "settling":
            self.wait(SECOND)

    def save_and_leave(self, job: ClusterJob) -> None:
        """A gang that is given up forms once more, and writes what memory holds."""
        assert job.gang.phase == "joining" and job.gang.ending is not None
        joined = GangJoined(job=job.id, generation=job.generation, step=job.committed)
        self.tell(joined, 2 * SECOND)
        assert self.last_restore().saves
        self.tell(GangReady(job=job.id, generation=job.generation, step=job.gang.restored), SECOND)
        assert job.state == "draining"
        saved = GangDrained(job=job.id, generation=job.generation, step=job.gang.restored)
        self.tell(saved, SECOND)

    def train(self, job: ClusterJob, steps: int, **fields: int) -> None:
        """Makes steps, all of them committed; checkpoints are durable when they are due."""
        every = job.spec.expected.checkpoint_steps
        first = self.core.ledger.accounts[job.id].step
        step = first + steps
        took = steps * job.spec.expected.step_ns
        self.tell(
            Progress(
                job=job.id,
                generation=job.generation,
                step=step,
                committed=step,
                at_ns=self.now_ns + took,
                **{"durable": step // every * every if every else 0, **fields},
            ),
            took,
        )

    def running(self, steps: int = 150, **fields: object) -> ClusterJob:
        """A job that has made some steps."""
        job = self.submit(**fields)
        self.run(job)
        self.train(job, steps)
        return job

    def bodies(self, kind: type[B]) -> list[B]:
        """Bodies of one kind among all commands so far, oldest first."""
        return [command.body for command in self.sent if isinstance(command.body, kind)]

    def last_form(self) -> Form:
        return self.bodies(Form)[-1]

    def last_restore(self) -> Restore:
        return self.bodies(Restore)[-1]

    def _hand(self, body: EventBody) -> list[Command]:
        event = Event(len(self.log) + 1, self.now_ns, body)
        self.log.append(event)
        commands = self.core.handle(event)
        self.sent.extend(commands)
        return commands

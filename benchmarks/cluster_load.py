"""A busy fleet as events: jobs come, train, fail, recover and end; made by one seed."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator

from phalanx.cluster.core import Core
from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.jobs.job import Expected, GangShape, JobSpec
from phalanx.cluster.node import Node, NodeState
from phalanx.cluster.policy import Policy, QueuePolicy, SparePolicy
from phalanx.cluster.protocol.commands import Check, Command, Drain, Form, Restore
from phalanx.cluster.protocol.events import (
    Event,
    EventBody,
    GangDrained,
    GangJoined,
    GangReady,
    JobFinished,
    NodeRepaired,
    NodeSilent,
    Progress,
    Submit,
    Tick,
)
from phalanx.cluster.protocol.messages import CheckResult, DeviceError, WorkerExited

SECOND = 10**9
# Replicas of one node each, and how many jobs of that size are kept in the fleet.
SIZES = ((4096, 1), (1024, 2), (256, 8), (64, 30), (8, 150), (1, 600))


def fleet_of(nodes: int) -> Fleet:
    """Nodes of eight GPUs, 32 under a leaf, eight leaves in a pod."""
    return Fleet(
        Node(
            name=f"n{i}",
            kind="h100",
            features=("nvlink",),
            rails=8,
            leaf=f"leaf-{i // 32}",
            pod=f"pod-{i // 256}",
            rack=f"rack-{i // 4}",
        )
        for i in range(nodes)
    )


def policy_of() -> Policy:
    """Spares for the fleet; the queue is looked at once a second."""
    return Policy(queue=QueuePolicy(delay_ns=SECOND), spares=SparePolicy(nodes=60))


class Load:
    """The world: answers commands, lets jobs make steps, breaks things."""

    def __init__(self, core: Core, seed: int) -> None:
        self.core = core
        self.rng = random.Random(seed)
        self.ahead: list[tuple[int, int, EventBody]] = []
        self.order = 0
        self.now_ns = 0
        for replicas, count in SIZES:
            for _ in range(count):
                self._later(self.rng.randrange(60 * SECOND), self._job(replicas))

    def events(self, count: int) -> Iterator[Event]:
        """The next events; the core is fed by whoever iterates, through ``sent``."""
        for _ in range(count):
            due = self.core.next_deadline_ns()
            if due is not None and (not self.ahead or due <= self.ahead[0][0]):
                self.now_ns = max(self.now_ns, due)
                body: EventBody = Tick()
            else:
                self.now_ns, _, body = heapq.heappop(self.ahead)
            yield Event(self.core.sequence + 1, self.now_ns, body)
            self._follow(body)

    def sent(self, commands: list[Command]) -> None:
        """What the core ordered is done, a while later."""
        for command in commands:
            match command.body:
                case Form(job=job, generation=generation):
                    step = self.core.view.jobs[job].step
                    joined = GangJoined(job=job, generation=generation, step=step - 1)
                    self._later(self.rng.randrange(5, 15) * SECOND, joined)
                case Restore(job=job, generation=generation, step=step):
                    ready = GangReady(job=job, generation=generation, step=step)
                    self._later(self.rng.randrange(2, 8) * SECOND, ready)
                case Drain(job=job, generation=generation):
                    step = self.core.view.jobs[job].step
                    self._later(5 * SECOND, GangDrained(job=job, generation=generation, step=step))
                case Check(node=node):
                    passed = self.rng.random() < 0.7
                    result = CheckResult(node=node, check="full", passed=passed)
                    self._later(60 * SECOND, result)

    def _follow(self, body: EventBody) -> None:
        """What comes of an event that the core has taken in."""
        match body:
            case GangReady(job=job, generation=generation, step=step):
                self._step(job, generation, step)
            case Progress(job=job, generation=generation, step=step):
                self._step(job, generation, step)
            case NodeSilent(node=node):
                self._later(3600 * SECOND, NodeRepaired(node=node))
            case CheckResult(node=node, passed=False):
                self._later(3600 * SECOND, NodeRepaired(node=node))
            case JobFinished():
                self._later(30 * SECOND, self._job(self.rng.choice((1, 1, 1, 8, 8, 64))))

    def _step(self, number: int, generation: int, step: int) -> None:
        job = self.core.view.jobs[number]
        if job.generation != generation or job.placement is None:
            return
        chance = self.rng.random()
        nodes = job.placement.nodes
        node = nodes[self.rng.randrange(len(nodes))]
        if chance < 0.002:
            self._later(SECOND, NodeSilent(node=node))
        elif chance < 0.004:
            self._later(SECOND, DeviceError(node=node, cause="hbm_ecc"))
        elif chance < 0.008:
            exited = WorkerExited(
                job=number, generation=generation, node=node, rank=0, cause="worker_killed"
            )
            self._later(SECOND, exited)
        elif chance < 0.012 and len(nodes) < 100:
            self._later(SECOND, JobFinished(job=number, generation=generation, step=step))
        else:
            pause = 5 * SECOND
            done = step + 2
            progress = Progress(
                job=number,
                generation=generation,
                step=done,
                committed=done,
                durable=done // 100 * 100,
                at_ns=self.now_ns + pause,
            )
            self._later(pause, progress)

    def _job(self, replicas: int) -> Submit:
        shape = GangShape(
            replicas=replicas,
            least_replicas=max(1, replicas // 2),
            tensor=8,
            slot_gpus=8,
            slot_cpus=32,
        )
        expected = Expected(step_ns=2 * SECOND, checkpoint_steps=100)
        return Submit(spec=JobSpec(name=f"job-{replicas}", gang=shape, expected=expected))

    def _later(self, after_ns: int, body: EventBody) -> None:
        self.order += 1
        heapq.heappush(self.ahead, (self.now_ns + after_ns, self.order, body))


def healthy(core: Core) -> int:
    """Nodes that can work."""
    fleet = core.view.fleet
    return sum(fleet.state(n) in (NodeState.HEALTHY, NodeState.SPARE) for n in range(len(fleet)))

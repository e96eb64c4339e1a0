"""Fleets under random events, mostly plausible ones: every invariant after each of them."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys

import msgspec
import pytest
from msgspec import structs

from phalanx.cluster.causes import CAUSES
from phalanx.cluster.core import Core
from phalanx.cluster.job_relations import Array, Dependency
from phalanx.cluster.jobs.job import Expected, GangShape, JobSpec, SpecChange
from phalanx.cluster.policy import HealthPolicy, Policy, RecoveryPolicy, SparePolicy
from phalanx.cluster.protocol.commands import Check, Drain, Form, Restore
from phalanx.cluster.protocol.events import (
    Answer,
    Cancel,
    ControllerStarted,
    Corruption,
    DrainNode,
    GangDrained,
    GangJoined,
    GangReady,
    GangStuck,
    Hold,
    JobFinished,
    NodeDescribed,
    NodeJoined,
    NodeRepaired,
    NodeSilent,
    NoProgress,
    Progress,
    QuarantineNode,
    ReadmitNode,
    Replan,
    Requeue,
    Scale,
    SlowRank,
    Submit,
)
from phalanx.cluster.protocol.messages import (
    CheckResult,
    DeviceError,
    Holding,
    Inventory,
    NodeNotice,
    NodeSeen,
    RestoreFailed,
    WorkerExited,
)
from tests.cluster.drive import SECOND, Drive, fleet_of
from tests.cluster.invariants import check

NODES = 12
CAUSE_NAMES = sorted(CAUSES)
PAUSES = (0, 0, SECOND // 20, SECOND, 10 * SECOND, 100 * SECOND, 2000 * SECOND)
POLICY = Policy(
    spares=SparePolicy(nodes=1),
    health=HealthPolicy(breaker_least_nodes=4),
    recovery=RecoveryPolicy(grow_after_ns=20 * SECOND, spike_rollback_steps=5),
)


class World:
    """Answers most commands as it should, and breaks things."""

    def __init__(self, seed: int, policy: Policy = POLICY) -> None:
        self.rng = random.Random(seed)
        self.policy = policy
        self.drive = Drive(policy=policy, fleet=fleet_of(NODES))
        self.answers: list[object] = []

    def run(self, events: int) -> None:
        for _ in range(events):
            before = len(self.drive.sent)
            pauses = PAUSES[:4] if self.answers else PAUSES
            self.drive.tell(self.next_event(), self.rng.choice(pauses))
            for command in self.drive.sent[before:]:
                self.answer(command.body)
            check(self.drive.core)
            if self.rng.random() < 0.02:
                self.drive.core = Core.restore(self.drive.core.snapshot())
                self.drive.tell(ControllerStarted(epoch=self.drive.core.epoch + 1))
        again = Core(fleet_of(NODES), self.policy)
        commands = [command for event in self.drive.log for command in again.handle(event)]
        assert commands == self.drive.sent
        assert again.snapshot() == self.drive.core.snapshot()

    def answer(self, body: object) -> None:
        if self.rng.random() < 0.1:
            return  # lost
        match body:
            case Form(job=job, generation=generation):
                step = self.drive.core.view.jobs[job].step - self.rng.randrange(-1, 3)
                self.answers.append(GangJoined(job=job, generation=generation, step=max(-1, step)))
            case Restore(job=job, generation=generation, step=step):
                self.answers.append(GangReady(job=job, generation=generation, step=step))
            case Drain(job=job, generation=generation):
                step = self.drive.core.view.jobs[job].step
                self.answers.append(GangDrained(job=job, generation=generation, step=step))
            case Check(node=node):
                passed = self.rng.random() < 0.8
                self.answers.append(CheckResult(node=node, check="full", passed=passed))

    def next_event(self) -> object:
        rng = self.rng
        if self.answers and rng.random() < 0.8:
            late = rng.random() < 0.1
            return self.answers.pop(rng.randrange(len(self.answers)) if late else 0)
        view = self.drive.core.view
        running = [job for job in view.jobs.values() if job.state == "running"]
        if not view.jobs or rng.random() < 0.12:
            return self.submission()
        if running and rng.random() < 0.5:
            return self.of_gang(rng.choice(running))
        if rng.random() < 0.3:
            return self.of_job(rng.choice(list(view.jobs.values())))
        return self.of_node(rng.randrange(NODES))

    def submission(self) -> Submit:
        rng = self.rng
        slot_gpus = rng.choice((0, 1, 4, 8, 8, 8))
        most = rng.choice((1, 2, 2, 3, 4))
        shape = GangShape(
            replicas=most,
            least_replicas=rng.choice((0, 1, most)),
            most_replicas=most + rng.choice((0, 0, 2)),
            tensor=rng.choice((1, max(1, slot_gpus), max(1, slot_gpus // 2))),
            pipeline=rng.choice((1, 1, 2)),
            slot_gpus=slot_gpus,
            slot_cpus=rng.choice((1, 16)),
            whole_nodes=rng.random() < 0.1,
        )
        after = ()
        if rng.random() < 0.2:
            kind = rng.choice(("afterok", "afterany", "afternotok", "singleton"))
            after = (Dependency(kind, rng.randrange(1, len(self.drive.core.view.jobs) + 2)),)
        return Submit(
            spec=JobSpec(
                name=rng.choice("ab"),
                team=rng.choice(("red", "blue")),
                gang=shape,
                expected=Expected(
                    steps=rng.choice((0, 1000)),
                    checkpoint_steps=10,
                    micro_batches=8,
                    exposed_ns=SECOND // 10,
                ),
                priority=rng.randrange(3),
                preemptible=rng.random() < 0.5,
                spares=rng.choice((0, 0, 1, 2)),
                retries=rng.randrange(3),
                time_limit_ns=rng.choice((0, 3000 * SECOND)),
                requeue_at_limit=rng.random() < 0.5,
                budget_gpu_seconds=rng.choice((0, 10**6)),
                forced=True,
                array=Array(3, 2) if rng.random() < 0.1 else None,
                after=after,
                begin_ns=self.drive.now_ns + 500 * SECOND if rng.random() < 0.1 else 0,
                deadline_ns=self.drive.now_ns + 4000 * SECOND if rng.random() < 0.1 else 0,
                held=rng.random() < 0.05,
            )
        )

    def of_gang(self, job) -> object:
        rng, number, generation = self.rng, job.id, job.generation
        node = rng.choice(job.placement.nodes)
        roll = rng.random()
        if roll < 0.5:
            step = self.drive.core.ledger.accounts[number].step + rng.randrange(1, 30)
            return Progress(
                job=number,
                generation=generation - (rng.random() < 0.05),
                step=step,
                committed=step,
                durable=step // 10 * 10,
                at_ns=self.drive.now_ns + rng.choice(PAUSES) // 2,
                data_wait_ns=rng.choice(PAUSES) // 7,
                straggler_ns=rng.choice(PAUSES) // 5,
                busy_ns=rng.choice(PAUSES) // 3,
            )
        if roll < 0.65:
            return WorkerExited(
                job=number,
                generation=generation,
                node=node,
                rank=0,
                cause=rng.choice(CAUSE_NAMES),
            )
        if roll < 0.72:
            return JobFinished(job=number, generation=generation, step=job.step)
        if roll < 0.8:
            return SlowRank(
                job=number,
                generation=generation,
                node=node,
                rank=0,
                part=rng.choice(("compute", "communication", "host")),
                slowdown_ppm=rng.choice((20_000, 300_000, 2_000_000)),
            )
        if roll < 0.87:
            culprits = rng.choice(((), (node,)))
            return NoProgress(job=number, generation=generation, step=job.step, nodes=culprits)
        if roll < 0.93:
            return Corruption(
                job=number,
                generation=generation,
                step=job.step,
                clean_step=max(0, job.step - rng.randrange(20)),
                nodes=rng.choice(((), (node,))),
            )
        return Scale(job=number, replicas=rng.randrange(1, 7))

    def of_job(self, job) -> object:
        rng, number, generation = self.rng, job.id, job.generation
        nodes = job.placement.nodes if job.placement else (0,)
        return rng.choice(
            (
                Cancel(job=number, array=rng.random() < 0.2),
                Requeue(job=number),
                Hold(job=number, held=rng.random() < 0.5, array=rng.random() < 0.2),
                self.replan(job),
                GangStuck(
                    job=number,
                    generation=generation,
                    phase=rng.choice(("join", "restore", "drain")),
                    nodes=(rng.choice(nodes),),
                ),
                RestoreFailed(
                    job=number,
                    generation=generation,
                    node=nodes[0],
                    source=rng.choice(("peer", "disk", "remote")),
                    step=job.durable,
                ),
                GangJoined(job=number, generation=generation, step=-1, empty=nodes[:1]),
            )
        )

    def replan(self, job) -> Replan:
        shape, stages = job.spec.gang, self.rng.choice((1, 2))
        gang = structs.replace(
            shape, replicas=self.rng.randrange(1, 5), least_replicas=0, most_replicas=0
        )
        if shape.slot_gpus:
            gang = structs.replace(gang, pipeline=stages)
        spares = self.rng.choice((0, 1))
        if spares and job.spec.spares:  # other stages of what it reads, from a near step on
            spec = structs.replace(job.spec, payload=f"{job.spec.payload}, {stages}")
            change = SpecChange(spec=spec, made_before=job.step + stages, own=job.own)
            return Replan(job=job.id, change=change)
        spec = structs.replace(job.spec, gang=gang, payload=str(stages), spares=spares)
        return Replan(job=job.id, change=SpecChange(spec=spec))

    def of_node(self, node: int) -> object:
        rng = self.rng
        roll = rng.random()
        if roll < 0.3:
            return NodeRepaired(node=node)
        if roll < 0.5:
            return NodeSilent(node=node, connection_lost=rng.random() < 0.5)
        if roll < 0.65:
            return DeviceError(node=node, cause=rng.choice(CAUSE_NAMES), rail=rng.randrange(-1, 8))
        if roll < 0.85:
            held = tuple(
                Holding(
                    job,
                    self.drive.core.view.jobs[job].generation - rng.randrange(2),
                    "running",
                    1,
                    1,
                )
                for job in self.drive.core.view.fleet.held[node]
                if rng.random() < 0.8
            )
            inventory = Inventory(0, held)
            if roll < 0.81:
                return NodeSeen(node=node, inventory=inventory)
            kind, gpus = rng.choice(("h100", "h100", "a100")), rng.choice((4, 8, 8))
            known = self.drive.core.view.fleet.nodes[node]
            other = structs.replace(known, kind=kind, gpus=gpus)
            return NodeJoined(node=other, inventory=inventory)
        if roll < 0.88:
            known = self.drive.core.view.fleet.nodes[node]
            place = {key: rng.choice("ab") for key in ("domain", "leaf", "pod", "rack")}
            moved = structs.replace(known, rails=rng.randrange(1, 9), **place)
            return NodeDescribed(node=node, described=moved)
        if roll < 0.9 and self.drive.core.questions:
            question = next(iter(self.drive.core.questions))
            return Answer(question=question, approve=rng.random() < 0.5)
        deadline = self.drive.now_ns + 60 * SECOND
        return rng.choice(
            (
                DrainNode(node=node),
                ReadmitNode(node=node, tested=rng.random() < 0.5),
                QuarantineNode(node=node),
                NodeNotice(node=node, deadline_ns=deadline),
                CheckResult(node=node, check="quick", passed=rng.random() < 0.5),
            )
        )


def digest(seeds: range) -> str:
    """One number for all that a few fleets did."""
    found = hashlib.sha256()
    for seed in seeds:
        world = World(seed)
        world.run(120)
        found.update(world.drive.core.snapshot())
        for command in world.drive.sent:
            found.update(msgspec.json.encode(command))
    return found.hexdigest()


def test_nothing_depends_on_hashing():
    program = "from tests.cluster.test_fuzz import digest; print(digest(range(100, 110)))"
    found = [
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("seed", range(24))
def test_nothing_breaks_an_invariant(seed):
    World(seed).run(120)


@pytest.mark.soak
@pytest.mark.parametrize("block", range(20))
def test_nothing_breaks_an_invariant_for_long(block):
    for seed in range(block * 200, (block + 1) * 200):
        World(seed).run(300)

"""The core under arbitrary events: every invariant after each, and the log replayed at the end."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from phalanx.cluster.causes import CAUSES
from phalanx.cluster.core import Core
from phalanx.cluster.job_relations import Array, Dependency
from phalanx.cluster.jobs.job import Expected, GangShape, JobSpec
from phalanx.cluster.policy import (
    HealthPolicy,
    Policy,
    RecoveryPolicy,
    SparePolicy,
    StoragePolicy,
)
from phalanx.cluster.protocol.events import (
    Answer,
    Cancel,
    ControllerStarted,
    Corruption,
    DrainNode,
    EventBody,
    GangDrained,
    GangJoined,
    GangReady,
    GangStuck,
    Hold,
    JobFinished,
    LossSpike,
    NodeRepaired,
    NodeSilent,
    NoProgress,
    Progress,
    QuarantineNode,
    ReadmitNode,
    Requeue,
    Scale,
    SlowRank,
    StorageSlow,
    Submit,
)
from phalanx.cluster.protocol.messages import (
    CheckResult,
    DeviceError,
    FlushWanted,
    Holding,
    Inventory,
    NodeNotice,
    NodeSeen,
    RestoreFailed,
    WorkerExited,
)
from tests.cluster.drive import SECOND, Drive, fleet_of
from tests.cluster.invariants import check

NODES = 10
POLICY = Policy(
    spares=SparePolicy(nodes=1),
    health=HealthPolicy(breaker_least_nodes=3),
    recovery=RecoveryPolicy(grow_after_ns=20 * SECOND, spike_rollback_steps=5),
    storage=StoragePolicy(bytes_per_second=10**9, flushes=1),
)

nodes = st.integers(-1, NODES)
jobs = st.integers(1, 8)
pauses = st.sampled_from([0, 0, SECOND // 20, SECOND, 10 * SECOND, 100 * SECOND, 4000 * SECOND])
shapes = st.builds(
    GangShape,
    replicas=st.integers(1, 4),
    least_replicas=st.integers(0, 1),
    tensor=st.sampled_from([1, 4, 8, 16]),
    pipeline=st.integers(1, 2),
    slot_gpus=st.sampled_from([0, 1, 4, 8]),
)
specs = st.builds(
    JobSpec,
    name=st.sampled_from("ab"),
    gang=shapes,
    expected=st.builds(
        Expected,
        steps=st.sampled_from([0, 1000]),
        checkpoint_steps=st.just(10),
        micro_batches=st.sampled_from([0, 8]),
        exposed_ns=st.just(SECOND // 10),
    ),
    spares=st.integers(0, 1),
    retries=st.integers(0, 2),
    time_limit_ns=st.sampled_from([0, 3000 * SECOND]),
    requeue_at_limit=st.booleans(),
    budget_gpu_seconds=st.sampled_from([0, 100_000]),
    forced=st.just(True),
    preemptible=st.booleans(),
    array=st.none() | st.builds(Array, st.integers(1, 3), st.integers(0, 2)),
    after=st.lists(
        st.builds(Dependency, st.sampled_from(["afterok", "afterany", "singleton"]), jobs),
        max_size=1,
    ).map(tuple),
)


class Anything(RuleBasedStateMachine):
    """Facts and orders in any order, most of them about what exists, some about what does not."""

    @initialize()
    def begin(self) -> None:
        self.drive = Drive(policy=POLICY, fleet=fleet_of(NODES))
        self.generations: dict[int, int] = {}

    def tell(self, body: EventBody, pause: int) -> None:
        self.drive.tell(body, pause)

    def job(self, number: int) -> tuple[int, int, int]:
        job = self.drive.core.view.jobs.get(number)
        return (number, job.generation, job.step) if job else (number, 1, 0)

    @rule(spec=specs, pause=pauses)
    def submit(self, spec, pause):
        self.tell(Submit(spec=spec), pause)

    @rule(number=jobs, pause=pauses, step=st.integers(-1, 3), empty=st.lists(nodes, max_size=2))
    def joined(self, number, pause, step, empty):
        job, generation, reached = self.job(number)
        known = max(-1, reached - step) if step >= 0 else -1
        self.tell(GangJoined(job=job, generation=generation, step=known, empty=tuple(empty)), pause)

    @rule(number=jobs, pause=pauses)
    def ready(self, number, pause):
        job, generation, _ = self.job(number)
        known = self.drive.core.view.jobs.get(number)
        step = known.gang.restored if known is not None and known.gang else 0
        self.tell(GangReady(job=job, generation=generation, step=step), pause)

    @rule(number=jobs, pause=pauses, steps=st.integers(0, 30), old=st.booleans())
    def progress(self, number, pause, steps, old):
        job, generation, reached = self.job(number)
        account = self.drive.core.ledger.accounts.get(number)
        step = (account.step if account else reached) + steps
        self.tell(
            Progress(
                job=job,
                generation=generation - old,
                step=step,
                committed=step,
                durable=step // 10 * 10,
                at_ns=self.drive.now_ns + pause // 2,
                data_wait_ns=pause // 7,
                straggler_ns=pause // 5,
                busy_ns=pause // 3,
            ),
            pause,
        )

    @rule(number=jobs, pause=pauses, slot=st.integers(0, 7), cause=st.sampled_from(sorted(CAUSES)))
    def exited(self, number, pause, slot, cause):
        job, generation, _ = self.job(number)
        known = self.drive.core.view.jobs.get(number)
        where = known.placement.nodes if known and known.placement else (slot,)
        self.tell(
            WorkerExited(
                job=job,
                generation=generation,
                node=where[slot % len(where)],
                rank=0,
                cause=cause,
            ),
            pause,
        )

    @rule(node=nodes, pause=pauses, lost=st.booleans())
    def silent(self, node, pause, lost):
        self.tell(NodeSilent(node=node, connection_lost=lost), pause)

    @rule(node=nodes, pause=pauses, incarnation=st.integers(0, 3), holding=st.booleans(), job=jobs)
    def seen(self, node, pause, incarnation, holding, job):
        number, generation, step = self.job(job)
        held = (Holding(number, generation, "running", step, step),) if holding else ()
        self.tell(NodeSeen(node=node, inventory=Inventory(incarnation, held)), pause)

    @rule(node=nodes, pause=pauses, cause=st.sampled_from(sorted(CAUSES)), rail=st.integers(-1, 7))
    def device(self, node, pause, cause, rail):
        self.tell(DeviceError(node=node, cause=cause, rail=rail, job=1), pause)

    @rule(node=nodes, pause=pauses, passed=st.booleans())
    def checked(self, node, pause, passed):
        self.tell(CheckResult(node=node, check="full", passed=passed), pause)

    @rule(
        node=nodes,
        pause=pauses,
        order=st.sampled_from([NodeRepaired, DrainNode, ReadmitNode, QuarantineNode]),
    )
    def care(self, node, pause, order):
        self.tell(order(node=node), pause)

    @rule(node=nodes, pause=pauses)
    def notice(self, node, pause):
        self.tell(NodeNotice(node=node, deadline_ns=self.drive.now_ns + 60 * SECOND), pause)

    @rule(number=jobs, pause=pauses, order=st.sampled_from([Cancel, Requeue, Hold]))
    def order(self, number, pause, order):
        self.tell(order(job=number), pause)

    @rule(number=jobs, pause=pauses)
    def let_go(self, number, pause):
        self.tell(Hold(job=number, held=False), pause)

    @rule(number=jobs, pause=pauses, replicas=st.integers(1, 4))
    def scale(self, number, pause, replicas):
        self.tell(Scale(job=number, replicas=replicas), pause)

    @rule(
        number=jobs,
        pause=pauses,
        phase=st.sampled_from(["join", "restore", "drain"]),
        who=st.lists(nodes, max_size=2),
    )
    def stuck(self, number, pause, phase, who):
        job, generation, _ = self.job(number)
        self.tell(GangStuck(job=job, generation=generation, phase=phase, nodes=tuple(who)), pause)

    @rule(number=jobs, pause=pauses, who=st.lists(nodes, max_size=2))
    def hang(self, number, pause, who):
        job, generation, step = self.job(number)
        self.tell(NoProgress(job=job, generation=generation, step=step, nodes=tuple(who)), pause)

    @rule(
        number=jobs,
        pause=pauses,
        who=st.lists(nodes, max_size=2),
        back=st.integers(0, 30),
        words=st.lists(st.tuples(nodes, st.integers(0, 2)), max_size=3),
    )
    def corrupt(self, number, pause, who, back, words):
        job, generation, step = self.job(number)
        self.tell(
            Corruption(
                job=job,
                generation=generation,
                step=step,
                clean_step=max(0, step - back),
                nodes=tuple(who),
                claims=tuple(words),
            ),
            pause,
        )

    @rule(
        number=jobs,
        pause=pauses,
        node=nodes,
        part=st.sampled_from(["compute", "communication", "host"]),
        slowdown=st.sampled_from([20_000, 300_000, 2_000_000]),
    )
    def slow(self, number, pause, node, part, slowdown):
        job, generation, _ = self.job(number)
        self.tell(
            SlowRank(
                job=job,
                generation=generation,
                node=node,
                rank=0,
                part=part,
                slowdown_ppm=slowdown,
            ),
            pause,
        )

    @rule(number=jobs, pause=pauses)
    def spike(self, number, pause):
        job, generation, step = self.job(number)
        self.tell(LossSpike(job=job, generation=generation, step=step), pause)

    @rule(number=jobs, pause=pauses, source=st.sampled_from(["peer", "disk", "remote"]))
    def refused(self, number, pause, source):
        job, generation, step = self.job(number)
        self.tell(
            RestoreFailed(job=job, generation=generation, node=0, source=source, step=step),
            pause,
        )

    @rule(number=jobs, pause=pauses)
    def finished(self, number, pause):
        job, generation, step = self.job(number)
        self.tell(JobFinished(job=job, generation=generation, step=step), pause)

    @rule(number=jobs, pause=pauses, durable=st.booleans())
    def drained(self, number, pause, durable):
        job, generation, step = self.job(number)
        self.tell(GangDrained(job=job, generation=generation, step=step, durable=durable), pause)

    @rule(number=jobs, pause=pauses, done=st.booleans(), rate=st.sampled_from([0, 10**9]))
    def flush(self, number, pause, done, rate):
        job, generation, step = self.job(number)
        self.tell(StorageSlow(bytes_per_second=rate), 0)
        if done:
            told = Progress(
                job=job,
                generation=generation,
                step=step + 1,
                committed=step,
                durable=step,
                at_ns=self.drive.now_ns,
            )
            self.tell(told, pause)
        else:
            self.tell(FlushWanted(job=job, generation=generation), pause)

    @rule(pause=pauses, approve=st.booleans())
    def answer(self, pause, approve):
        for question in list(self.drive.core.questions)[:1]:
            self.tell(Answer(question=question, approve=approve), pause)

    @rule()
    def crash(self):
        """The controller dies; another one goes on from a snapshot."""
        self.drive.core = Core.restore(self.drive.core.snapshot())
        self.tell(ControllerStarted(epoch=self.drive.core.epoch + 1), SECOND)

    @invariant()
    def holds(self) -> None:
        check(self.drive.core)
        for number, job in self.drive.core.view.jobs.items():
            assert job.generation >= self.generations.get(number, 0), "generations only rise"
            self.generations[number] = job.generation

    def teardown(self) -> None:
        if not hasattr(self, "drive"):
            return
        again = Core(fleet_of(NODES), POLICY)
        commands = [command for event in self.drive.log for command in again.handle(event)]
        assert again.snapshot() == self.drive.core.snapshot()
        assert commands == self.drive.sent


TestAnything = Anything.TestCase
TestAnything.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)


@pytest.mark.soak
class TestAnythingForLong(Anything.TestCase):
    """The same for longer."""

    settings = settings(
        max_examples=2000,
        stateful_step_count=80,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )

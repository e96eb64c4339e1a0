"""The server's side of metrics: nodes' records in, steps of gangs out to detectors and store."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from msgspec import structs

from phalanx.cluster.detectors.robust import Ints
from phalanx.cluster.jobs.job import ClusterJob
from phalanx.cluster.placement.catalogued import CPU
from phalanx.cluster.protocol.events import EventBody, Progress
from phalanx.cluster.protocol.step_watch import GangRecord, StepWatch
from phalanx.control.server.history.run_history import RunHistory
from phalanx.observe.node.node_messages import NodeRecords
from phalanx.observe.node.node_records import PARTS, Floats
from phalanx.observe.node.node_sample import NodeSample
from phalanx.observe.node.printed_steps import PRINTED
from phalanx.observe.store.gang_steps import GangStep, GangSteps
from phalanx.observe.store.recorder import RecordedGang, Recorder
from phalanx.observe.tracker.findings import Trends
from phalanx.observe.tracker.runs import evaluation_summary, validation_summary
from phalanx.train.report.records import (
    CheckpointRecord,
    EvaluationRecord,
    RareRecord,
    ValidationRecord,
)

DATA = PARTS.index("data")
NS = 1_000_000_000


class Metrics:
    """What running gangs report of their steps. One instance a leadership."""

    def __init__(
        self,
        watch: StepWatch,
        tell: Callable[[Sequence[EventBody]], None],
        recorder: Recorder | None = None,
    ) -> None:
        self.steps = GangSteps()
        self.recorder = recorder  # None: nothing is kept
        self.run_history: RunHistory | None = None
        self._straggler_ns: dict[int, int] = {}  # by job: not in the ledger yet
        self.temperature: dict[int, float] = {}  # by node: of its hottest GPU, in Celsius
        self.watts: dict[int, float] = {}  # by node: of all its GPUs
        self._trends = Trends()
        self._watch, self._tell = watch, tell

    def begin(self, job: ClusterJob, names: Sequence[str]) -> None:
        """A gang runs from now on, on nodes of these names."""
        placement, shape = job.placement, job.spec.gang
        assert placement is not None
        known = self.steps.gangs.get(job.id)
        if known is not None and known.generation == job.generation:
            return
        slot_ranks, world = max(1, shape.slot_gpus), shape.ranks(placement.replicas)
        self.steps.begin(job.id, job.generation, placement.nodes, slot_ranks, world)
        if self.recorder is not None:
            self.recorder.begin(
                RecordedGang(
                    job=job.id,
                    generation=job.generation,
                    world=world,
                    gpus=shape.gpus(placement.replicas),
                    planned_step_seconds=planned_ns(job) / NS,
                    node_names=names,
                    slot_ranks=slot_ranks,
                    program=not job.spec.reports_steps,
                )
            )

    def end(self, job: int) -> None:
        """A job is over, and the last words of its nodes have had time to come."""
        for step in self.steps.end(job):
            self._made(step, step.first_ns)
        self._trends.forget(job)
        self._straggler_ns.pop(job, None)
        if self.recorder is not None:
            self.recorder.end(job)

    def tells_steps(self, job: int, generation: int) -> bool:
        """Whether this gang reports its steps one by one."""
        gang = self.steps.gangs.get(job)
        return gang is not None and gang.generation == generation and gang.told

    def receive(self, message: NodeRecords, now_ns: int) -> None:
        """A node's words."""
        merged = self.steps.receive(message, now_ns)
        for step in merged.steps:
            self._made(step, now_ns)
        for record in merged.other:
            self._other(message.job, record, now_ns)
        if message.run is not None and 0 in message.ranks and self.run_history is not None:
            self.run_history.describe(message.job, message.run)

    def with_stragglers(self, body: EventBody) -> EventBody:
        """Progress with what its gang lost to slow ranks since the last one, for the ledger."""
        if isinstance(body, Progress) and self._straggler_ns.get(body.job):
            return structs.replace(body, straggler_ns=self._straggler_ns.pop(body.job))
        return body

    def sampled(self, sample: NodeSample, name: str, now_ns: int) -> None:
        """A look at a node's devices."""
        for column, kept, join in (
            ("gpu_temperature_celsius", self.temperature, max),
            ("gpu_power_watts", self.watts, sum),
        ):
            known = [value for value in sample.gpus.get(column, ()) if value == value]
            if known:
                kept[sample.node] = float(join(known))
        if self.recorder is not None:
            self.recorder.sample(sample, name, now_ns)

    def _made(self, step: GangStep, now_ns: int) -> None:
        lost_ns = straggler_ns(step, self._watch.slow_ranks(step.job, step.step))
        if lost_ns:
            self._straggler_ns[step.job] = self._straggler_ns.get(step.job, 0) + lost_ns
        found = self._watch.record(gang_record(step), now_ns)
        if found:
            self._tell(found)
        if self.recorder is None:
            return
        self.recorder.step(step)
        gang = self.recorder.gangs.get(step.job)
        if gang is not None and self.watts:
            nodes = self.steps.gangs[step.job].nodes if step.job in self.steps.gangs else {}
            known = [self.watts[node] for node in nodes if node in self.watts]
            gang.watts = sum(known) if len(known) == len(nodes) else 0.0
        if self.run_history is None or gang is None:
            return
        self.run_history.incidents.went_on(step.job, step.generation, step.time_ns)
        trends = self._trends.step(
            step.job,
            step.step,
            step.time_ns,
            seconds=largest(step.step_seconds),
            planned_seconds=gang.planned_step_seconds,
            memory_bytes=step.memory_bytes,
            grad_norm=step.head.grad_norm if step.head is not None else None,
        )
        for each in trends:
            self.run_history.add(each)
        self.run_history.made(step.job, self.recorder.latest[step.job])

    def _other(self, job: int, record: RareRecord, now_ns: int) -> None:
        if self.recorder is not None:
            self.recorder.other(job, record, now_ns)
        if isinstance(record, ValidationRecord) and self.run_history:
            self.run_history.validated(job, validation_summary(record.step, record.loss))
        if isinstance(record, EvaluationRecord) and self.run_history:
            self.run_history.validated(job, evaluation_summary(record.step, record.scores))
        if isinstance(record, CheckpointRecord) and not record.problem and self.run_history:
            self.run_history.saved(job, record.step, record.path, record.seconds)
            for each in self._trends.saved(job, record.step, now_ns, record.seconds):
                self.run_history.add(each)


def straggler_ns(step: GangStep, slow: Sequence[int]) -> int:
    """What the worst of the ranks that are known to be slow worked longer than the middle one."""
    own = step.compute_seconds
    if not slow or np.isnan(own).all():
        return 0
    known = [float(own[rank]) for rank in slow if rank < len(own) and not np.isnan(own[rank])]
    lost = max(known, default=0.0) - float(np.nanmedian(own))
    return max(0, int(lost * NS))


def planned_ns(job: ClusterJob) -> int:
    """What a step takes by the plan; 0: nobody planned it."""
    plan = job.spec.plan
    # CPU ranks share their cores with whatever else runs there: no plan to be held against.
    return plan.step_ns.mid if plan is not None and plan.step_ns and plan.device != CPU else 0


def gang_record(step: GangStep) -> GangRecord:
    """A step as the detectors want it."""
    head = step.head
    return GangRecord(
        job=step.job,
        generation=step.generation,
        step=step.step,
        step_ns=int(largest(step.step_seconds) * NS),
        loss=head.loss if head is not None else None,
        # A program may report steps without a loss, which is nothing to worry about.
        has_loss=head is not None and (head.loss is not None or head.non_finite),
        data_wait_ns=int(largest(step.parts[DATA]) * NS),
        compute_ns=_whole(step.compute_seconds),
        host_ns=_whole(step.host_seconds),
        launch_ns=_whole(step.launch_seconds),
        transfer_ns=_whole(step.send_seconds),
        printed=head is not None and head.mfu_basis == PRINTED,
    )


def largest(seconds: Floats) -> float:
    """The largest that is known; 0 when none is."""
    return 0.0 if np.isnan(seconds).all() else float(np.nanmax(seconds))


def _whole(seconds: Floats) -> Ints | None:
    """Nanoseconds by rank; one that did not tell counts as the middle. None: nobody told."""
    unknown = np.isnan(seconds)
    if unknown.all():
        return None
    if unknown.any():
        seconds = np.where(unknown, np.nanmedian(seconds), seconds)
    return (seconds.astype(np.float64) * NS).astype(np.int64)

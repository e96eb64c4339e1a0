"""Running gangs as their nodes measure them: who is slow, who hangs, and what is kept of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import numpy as np
from msgspec import structs

from phalanx.cluster.protocol.events import EventBody, NoProgress, Progress
from phalanx.cluster.protocol.messages import Activity, Busy
from phalanx.cluster.watch import GangRecord, StepWatch, WatchedGang
from phalanx.control.server.agent_link.step_records import Metrics
from phalanx.control.server.controller import Controller
from phalanx.control.server.hang_diagnosis import HangDiagnosis
from phalanx.control.server.http.views import job_of, names_of
from phalanx.control.wire.agent_messages import Seen
from phalanx.observe.node.node_messages import NodeRecords
from phalanx.observe.node.node_sample import NodeSample
from phalanx.observe.store.recorder import Recorder

logger = logging.getLogger("phalanx.server")

LAST_WORDS_SECONDS = 15.0  # nodes of an ended job may still tell of its last steps
RECENT_STEPS = 8  # that a node's pace is judged by
ENDED = ("done", "failed", "cancelled")

Measured = Seen | NodeRecords | NodeSample | Activity | Busy


class GangWatch:
    """Judges what agents measure. ``push`` sends a frame to a node."""

    def __init__(
        self,
        controller: Controller,
        push: Callable[[int, bytes], bool],
        recorder: Recorder | None,
    ) -> None:
        self._controller = controller
        self.watch = StepWatch()
        self.metrics = Metrics(self.watch, controller.tell, recorder)
        self._diagnosis = HangDiagnosis(self.watch, push, controller.tell, controller.clock.now_ns)
        self._failed = False  # a fault of ours in judging records was told

    def receive(self, message: Measured, now: int) -> None:
        """What an agent has measured."""
        match message:
            case Seen():
                self._diagnosis.receive(message)
            case NodeRecords():
                self._records(message, now)
            case NodeSample():
                self._sampled(message, now)
            case Activity():
                self.watch.active(message, now)
            case Busy():
                self.watch.busy(message, now)

    def _records(self, message: NodeRecords, now: int) -> None:
        """What a node tells of steps; whatever is wrong with it must not cost its connection."""
        job = self._controller.core.view.jobs.get(message.job)
        placed = job is not None and job.placement is not None and job.placement.nodes
        if message.run is not None and not (placed and placed[0] == message.node):
            message = structs.replace(message, run=None)  # where a run comes from, rank 0 says
        try:
            self.metrics.receive(message, now)
        except Exception:
            self.metrics.steps.refused += len(message.steps)
            if not self._failed:
                self._failed = True
                logger.exception("records of job %d cannot be judged; told once", message.job)

    def _sampled(self, message: NodeSample, now: int) -> None:
        """A look at a node's devices."""
        name = self._controller.core.view.fleet.nodes[message.node].name
        try:
            self.metrics.sampled(message, name, now)
        except Exception:
            self.metrics.steps.refused += 1
            if not self._failed:
                self._failed = True
                logger.exception("samples of %s cannot be kept; told once", name)

    def follow(self, number: int) -> None:
        """Watches a gang for as long as it runs."""
        view = self._controller.core.view
        job, known = view.jobs.get(number), self.watch.gangs.get(number)
        if job is None or job.placement is None or job.gang is None or job.gang.phase != "running":
            if known is not None:
                self.watch.end(number)
                if job is None or job.state in ENDED:
                    loop = asyncio.get_running_loop()
                    loop.call_later(LAST_WORDS_SECONDS, self._forget, number)
        elif known is None or known.generation != job.generation:
            self.watch.follow(job, view.policy.timeouts, self._controller.clock.now_ns())
            self.metrics.begin(job, names_of(view.fleet, job.placement.nodes))

    def _forget(self, number: int) -> None:
        if number not in self.watch.gangs:
            self.metrics.end(number)

    def progressed(self, body: Progress, now_ns: int) -> None:
        """A gang has made steps; where its nodes tell of each, that is all this says."""
        if self.metrics.tells_steps(body.job, body.generation):
            self.watch.alive(body.job, body.generation, body.step, now_ns)
            return
        job = self._controller.core.view.jobs.get(body.job)
        record = GangRecord(
            job=body.job,
            generation=body.generation,
            step=body.step,
            step_ns=job.step_ns if job else 0,
            data_wait_ns=body.data_wait_ns,
        )
        found = self.watch.record(record, now_ns)
        if found:
            self._controller.tell(found)

    def sweep(self, now: int) -> None:
        """Looks at deadlines of gangs."""
        for fact in self.watch.due(now):
            self._look_at(fact)

    def _look_at(self, fact: EventBody) -> None:
        """Before anything is done about a gang that hangs, its ranks are asked what they do."""
        job = self._controller.core.view.jobs.get(job_of(fact))
        if isinstance(fact, NoProgress) and job is not None and job.placement is not None:
            self._diagnosis.begin(fact, job.placement.nodes)
        else:
            self._controller.tell([fact])


def slowness(watch: StepWatch, nodes: int) -> list[float | None]:
    """By node: its own time of a step over the median of its stage; None: nobody told."""
    found: list[float | None] = [None] * nodes
    for gang in watch.gangs.values():
        for node, ratio in _of_gang(gang):
            if node < nodes:
                found[node] = ratio
    return found


def _of_gang(gang: WatchedGang) -> list[tuple[int, float]]:
    recent = list(gang.compute)[-RECENT_STEPS:]
    slot, where = max(1, gang.shape.slot_gpus), gang.placement.nodes
    world = gang.shape.ranks(gang.placement.replicas)
    if not recent or len(recent[-1]) != world:
        return []
    usual = np.median(np.stack([each for each in recent if len(each) == len(recent[-1])]), axis=0)
    stages = gang.shape.pipeline if len(usual) % gang.shape.pipeline == 0 else 1
    by_stage = usual.reshape(stages, -1)
    middle = np.median(by_stage, axis=1, keepdims=True)
    each = (by_stage / np.maximum(middle, 1)).reshape(-1)
    ratios = np.maximum.reduceat(each, range(0, world, slot))  # the last node may have fewer
    return [(node, round(float(ratio), 3)) for node, ratio in zip(where, ratios, strict=True)]

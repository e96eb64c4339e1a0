"""Running gangs as their nodes measure them: who is slow, and what is kept of it."""

from __future__ import annotations

import asyncio
import logging

import numpy as np
from msgspec import structs

from phalanx.cluster.protocol.step_watch import StepWatch, WatchedGang
from phalanx.control.server.agent_link.step_records import Metrics
from phalanx.control.server.controller import Controller
from phalanx.control.server.http.views import names_of
from phalanx.observe.node.node_messages import NodeRecords
from phalanx.observe.node.node_sample import NodeSample
from phalanx.observe.store.recorder import Recorder

logger = logging.getLogger("phalanx.server")

LAST_WORDS_SECONDS = 15.0  # nodes of an ended job may still tell of its last steps
RECENT_STEPS = 8  # that a node's pace is judged by


class GangWatch:
    """Judges and keeps what agents measure. ``watch`` is the controller machine's."""

    def __init__(self, controller: Controller, watch: StepWatch, recorder: Recorder | None) -> None:
        self._controller = controller
        self.watch = watch
        self.metrics = Metrics(watch, controller.tell, recorder)
        self._failed = False  # a fault of ours in judging records was told

    def receive(self, message: NodeRecords | NodeSample, now: int) -> None:
        """What an agent has measured."""
        if isinstance(message, NodeRecords):
            self._records(message, now)
        else:
            self._sampled(message, now)

    def _records(self, message: NodeRecords, now: int) -> None:
        """What a node tells of steps; whatever is wrong with it must not cost its connection."""
        job = self._controller.core.view.jobs.get(message.job)
        placed = job is not None and job.placement is not None and job.placement.nodes
        if message.run is not None and not (placed and placed[0] == message.node):
            message = structs.replace(message, run=None)  # where a run comes from, rank 0 says
        try:
            self.metrics.receive(message, now)
            if self.metrics.tells_steps(message.job, message.generation):
                self.watch.tells_each(message.job, message.generation)
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

    def begin(self, number: int) -> None:
        """A gang runs from now on."""
        view = self._controller.core.view
        job = view.jobs[number]
        assert job.placement is not None
        self.metrics.begin(job, names_of(view.fleet, job.placement.nodes))

    def end(self, number: int) -> None:
        """A gang runs no more; if its job is over, what was measured of it is closed."""
        job = self._controller.core.view.jobs.get(number)
        if job is None or job.ended:
            loop = asyncio.get_running_loop()
            loop.call_later(LAST_WORDS_SECONDS, self._forget, number)

    def _forget(self, number: int) -> None:
        if number not in self.watch.gangs:
            self.metrics.end(number)


def slowness(watch: StepWatch, nodes: int) -> list[float | None]:
    """By node: its own time of a step over the median of its stage; None: nobody told."""
    ratios: list[float | None] = [None] * nodes
    for gang in watch.gangs.values():
        for node, ratio in _of_gang(gang):
            if node < nodes:
                ratios[node] = ratio
    return ratios


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

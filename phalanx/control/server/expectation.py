"""What the planner expects of jobs, so that what they do can be held against it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from phalanx.cluster.jobs.job import ClusterJob
from phalanx.control.server.helper_process import BusyError, Helper, TooLongError
from phalanx.control.wire.payload import PayloadError, TrainingWork, decode_payload
from phalanx.observe import planning

if TYPE_CHECKING:
    from phalanx.control.server.leading import Leading

LOOK_SECONDS = 5.0


class Expectations:
    """Plans by job, each made once."""

    def __init__(self, helper: Helper) -> None:
        self._helper = helper
        self._known: dict[int, tuple[str, planning.JobPlan]] = {}  # with what the job ran then

    async def of(self, leading: Leading, job: ClusterJob) -> planning.JobPlan:
        """What is expected of a job on the nodes that it has, or had at last.

        BusyError or TooLongError where the planner has no time for it.
        """
        work, known = job.spec.payload, self._known.get(job.id)
        if known is not None and known[0] == work:
            return known[1]
        nodes = leading.controller.memory.placed.get(job.id, ())
        if not nodes:
            return planning.JobPlan(problem="it was not placed yet")
        plan = await self._made(job, leading.core.view.fleet.nodes[nodes[0]].kind)
        self._known[job.id] = work, plan
        if plan.prediction is not None:
            leading.run_history.planned(job.id, msgspec.to_builtins(plan.prediction))
        return plan

    async def _made(self, job: ClusterJob, device: str) -> planning.JobPlan:
        try:
            work = decode_payload(job.spec.payload)
        except PayloadError:
            return planning.JobPlan(problem="the job does not say what it runs")
        if not isinstance(work, TrainingWork):
            text = "it is a program of its own: the planner cannot see inside"
            return planning.JobPlan(problem=text)
        if not device:  # no need to start the helper's process
            return planning.job_plan("", 0, "")
        return await self._helper.call(planning.job_plan, work.toml, work.world_size, device)

    async def keep(self, leading: Leading) -> None:
        """Tell the recorder what running gangs should take for a step, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            with suppress(BusyError, TooLongError):
                await self.look(leading)

    async def look(self, leading: Leading) -> None:
        """One look at the gangs that run."""
        recorder = leading.hub.gangs.metrics.recorder
        for number, gang in list(recorder.gangs.items()) if recorder is not None else []:
            job = leading.core.view.jobs.get(number)
            if job is None or gang.planned_step_seconds:
                continue
            plan = await self.of(leading, job)
            if plan.prediction is not None:
                gang.planned_step_seconds = plan.prediction.step_seconds

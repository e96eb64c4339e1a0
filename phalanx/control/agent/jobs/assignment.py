"""Who takes which place of a generation: a process that lives, one that stands by, a new one."""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import suppress

from phalanx.cluster.protocol.commands import Form
from phalanx.control.agent.jobs.local_job import LocalJob, WorkerProcess
from phalanx.control.agent.jobs.start import Processes
from phalanx.control.agent.spawn.zygote_client import ZygoteClient, ZygoteError
from phalanx.control.agent.tasks import Tasks
from phalanx.control.wire.worker_messages import Take
from phalanx.train.rank.orders import Formation

ANSWER_SECONDS = 2.0  # a worker that lives answers at once; one that does not is replaced
START_SECONDS = 60.0  # for a new process to come
GONE_SECONDS = 10.0  # for a killed one to be gone

log = logging.getLogger("phalanx.agent")


class WorkerAssignment:
    """The places of all jobs of a node."""

    def __init__(self, zygote: ZygoteClient, processes: Processes, tasks: Tasks) -> None:
        self._zygote, self._processes, self._tasks = zygote, processes, tasks

    async def place(self, job: LocalJob, index: int, rank: int, form: Form, store: str) -> None:
        """A rank of a generation is taken, by whoever can."""
        host, _, port = store.rpartition(":")
        formation = Formation(
            generation=form.generation,
            rank=rank,
            world_size=form.world_size,
            local_rank=index,
            host=host,
            port=int(port or 0),
            prefix=job.meeting,
            buddy_shift=form.buddy_shift,
            backed_up=form.backup >= 0,
            replicas=form.replicas,
            micro_batches=form.micro_batches,
        )
        take = Take(
            job=job.number,
            formation=formation,
            asks_leave=form.asks_leave,
            payload=form.payload,
        )
        process = job.processes.get(index)
        if process is not None and process.status is None and process.last_generation:
            # It has said its last word: its exit, which is still to come, is not this generation's.
            self.end(job, index)
            self._tasks.later(self._take_over(job, process, take))
        elif process is not None and process.status is None:
            await self._give(job, process, take)
        else:
            await self._replace(job, index, take)

    async def _give(self, job: LocalJob, process: WorkerProcess, take: Take) -> None:
        """A process, or one that is about to be, gets its place."""
        place, process.take = take.formation, take
        process.rank, process.generation = place.rank, place.generation
        process.answered = process.restored = process.left = False
        if process.writer is not None:
            process.say(take)
            for order in job.orders:
                process.say(order)
        elif not process.pid:
            await self._processes.spawn(job, process)
        self._tasks.later(self._insist(job, process, take))

    async def _replace(self, job: LocalJob, index: int, take: Take) -> None:
        """Another process for a place: one that stands by, else a new one."""
        process = job.standbys.pop(index, None)
        if process is None or process.writer is None:
            process = job.new_process(index, take.formation.rank)
        job.processes[index] = process
        await self._give(job, process, take)

    async def _insist(self, job: LocalJob, process: WorkerProcess, take: Take) -> None:
        """A worker that does not answer (stopped, or stuck for good) gives way to a new one."""
        waited = 0.0
        while not process.answered and waited < START_SECONDS:
            await asyncio.sleep(ANSWER_SECONDS)
            waited += ANSWER_SECONDS
            if process.writer is not None:
                break
        if (
            process.take is take
            and not process.answered
            and job.processes.get(process.index) is process
        ):
            log.warning("job %d: rank %d does not answer and is replaced", job.number, process.rank)
            self.end(job, process.index)
            await self._take_over(job, process, take)

    def give_way(self, job: LocalJob, process: WorkerProcess) -> None:
        """A worker left because it could not follow: the next one takes its place."""
        take = process.take
        assert take is not None
        log.info("job %d: rank %d left its process for a new one", job.number, process.rank)
        self._tasks.later(self._take_over(job, process, take))

    async def _take_over(self, job: LocalJob, process: WorkerProcess, take: Take) -> None:
        """A new process takes a place of the current generation, once the old one is gone."""
        for _ in range(int(GONE_SECONDS / 0.01)):
            if process.key not in self._zygote.children:
                break
            await asyncio.sleep(0.01)
        async with job.forming:
            held = job.processes.get(process.index)
            if job.generation == take.formation.generation and held in (None, process):
                with suppress(ZygoteError):
                    await self._replace(job, process.index, take)

    async def stand_by(self, job: LocalJob) -> None:
        """Processes with a CUDA context made, for the next generation of a job that runs."""
        async with job.forming:
            for index in job.processes:
                if index not in job.standbys:
                    process = job.standbys[index] = job.standby(index)
                    with suppress(ZygoteError):
                        await self._processes.spawn(job, process, standby=True)

    def end(self, job: LocalJob, index: int) -> None:
        """A place is given up, and its process ends."""
        process = job.processes.pop(index, None)
        if process is not None:
            process.left = True
            self._zygote.signal(process.key, signal.SIGKILL)

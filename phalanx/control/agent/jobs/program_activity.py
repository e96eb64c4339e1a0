"""What programs do on a node, told to the server: one that reports no steps is judged by it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress

from phalanx.cluster.protocol.messages import Activity
from phalanx.control.agent.jobs.local_job import LocalJob
from phalanx.control.host.process_tree import ProcessStat, read_all, trees
from phalanx.control.wire.payload import Script

LOOK_SECONDS = 5.0

Gpus = Mapping[str, tuple[float, ...]]  # by metric, a value a GPU


class ProgramActivity:
    """Looks at the processes of a node's programs. ``gpus``: what devices did lately."""

    def __init__(
        self,
        jobs: dict[int, LocalJob],
        send: Callable[[Activity], None],
        node: Callable[[], int],
        gpus: Callable[[], Gpus],
    ) -> None:
        self._jobs, self._send, self._node, self._gpus = jobs, send, node, gpus

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self._node() >= 0 and self.wanted():
                table = await asyncio.to_thread(read_all)
                self.tell(table)

    def wanted(self) -> bool:
        """Whether a program runs here."""
        return any(runs_program(job) for job in self._jobs.values())

    def tell(self, table: dict[int, ProcessStat]) -> None:
        """Tell the server what each program has done so far."""
        node = self._node()
        for job in list(self._jobs.values()):
            if node >= 0 and runs_program(job):
                self._send(activity_of(job, node, table, self._gpus()))


def runs_program(job: LocalJob) -> bool:
    """Whether a job has a program's process here."""
    pids = (process.pid for process in job.processes.values() if process.status is None)
    return isinstance(job.work, Script) and job.generation > 0 and any(pids)


def activity_of(job: LocalJob, node: int, table: dict[int, ProcessStat], gpus: Gpus) -> Activity:
    """What the processes of a job have done on this node."""
    members = trees([process.pid for process in job.processes.values() if process.pid], table)
    pids = dict.fromkeys(pid for tree in members.values() for pid in tree)
    written = 0
    for process in job.processes.values():
        with suppress(OSError):
            written += job.log(process.index).stat().st_size
    return Activity(
        node=node,
        job=job.number,
        generation=job.generation,
        cpu_ns=sum(table[pid].cpu_ns for pid in pids),
        output_bytes=written,
        gpu_ppm=busiest_ppm(job.gpus, gpus),
        reports_steps=any(process.writer is not None for process in job.processes.values()),
    )


def busiest_ppm(mask: int, gpus: Gpus) -> int:
    """How busy the busiest GPU of a job is; -1: nobody can tell. ``mask`` 0: it holds all."""
    loads = [
        value
        for gpu, value in enumerate(gpus.get("gpu_utilization", ()))
        if not mask or mask >> gpu & 1
    ]
    return max((round(min(max(value, 0.0), 1.0) * 1_000_000) for value in loads), default=-1)

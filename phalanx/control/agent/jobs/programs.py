"""Programs of a user's own: started and ended, since they know nothing of generations."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from phalanx.checkpoint.keeper.messages import Saved
from phalanx.cluster.causes import Cause
from phalanx.cluster.protocol.commands import Abort, Drain, Form, Go, Restore, WorkerOrder
from phalanx.cluster.protocol.messages import (
    THIS_NODE,
    LocalFact,
    Restored,
    Sealed,
    WorkerExited,
    WorkerFound,
    WorkerUp,
)
from phalanx.control.agent.jobs.keeper_watch import save_kept
from phalanx.control.agent.jobs.local_job import LocalJob, WorkerProcess
from phalanx.control.agent.jobs.program_notes import ProgramNote, note_program
from phalanx.control.agent.jobs.program_result import result_variable
from phalanx.control.agent.jobs.start import Processes
from phalanx.control.agent.spawn.zygote_client import ZygoteClient
from phalanx.control.host.launchers import OWN_STORE, recognised, without_ranks
from phalanx.control.wire.payload import PayloadError, Script, decode_payload, encode_payload
from phalanx.control.wire.zygote_messages import Ended, Spawn

ENDED_POLL_SECONDS = 0.02  # a process that was killed is gone in a moment

MayStart = Callable[[], Awaitable[None]]

log = logging.getLogger("phalanx.agent")


class NodePrograms:
    """The programs of a node; ``processes`` knows as whom, where and with what they start."""

    def __init__(
        self,
        zygote: ZygoteClient,
        address: str,
        fact: Callable[[LocalFact], None],
        processes: Processes,
        may_start: MayStart,
    ) -> None:
        self._zygote, self._address, self._fact = zygote, address, fact
        self._processes, self._may_start = processes, may_start

    def place(self, job: LocalJob, index: int, rank: int, generation: int) -> None:
        """A rank is taken; its process starts when the whole gang may go."""
        process = job.processes[index] = job.new_process(index, rank)
        process.generation, process.launched = generation, index > 0 and is_launched(job)
        self._fact(WorkerUp(job=job.number, generation=generation, rank=rank))

    async def obey(self, job: LocalJob, order: WorkerOrder) -> None:
        """Carry out an order of the core for a program's ranks."""
        match order:
            case Restore():
                job.restored, job.saves = order.step, order.saves
                for process in job.processes.values():
                    restored = Restored(
                        job=job.number,
                        generation=order.generation,
                        rank=process.rank,
                        step=order.step,
                        source=order.source,
                    )
                    self._fact(restored)
            case Go() if job.saves:
                if order.generation == job.generation:
                    await self._save(job)
            case Go():
                await self._may_start()  # nobody else runs it
                async with job.forming:
                    if order.generation == job.generation:
                        await self._start(job)
            case Abort() | Drain():
                for process in job.processes.values():
                    process.sent_away = isinstance(order, Drain)
                    process.left |= isinstance(order, Abort)  # its end needs no explanation
                    self._zygote.signal(process.key, signal.SIGTERM)

    async def _save(self, job: LocalJob) -> None:
        """A job is given up: its keeper writes what it holds, and no program is needed for that."""
        generation, work = job.generation, job.work
        assert work is not None
        folder = job.program_saves(Path(work.folder or job.own_folder))
        saved = Saved("")
        if job.restored:
            saved = await save_kept(job.keeper_socket, job.restored, folder)
            log.warning("job %d: %s: %s", job.number, saved.path, saved.problem or "saved")
        detail = f"{saved.path}: {saved.problem}" if saved.problem else ""
        for process in job.processes.values():
            if job.restored and not saved.problem:
                done = Sealed(
                    job=job.number,
                    generation=generation,
                    rank=process.rank,
                    step=job.restored,
                    at_ns=time.time_ns(),
                    acknowledged=False,
                    durable=job.restored,
                )
                self._fact(done)
            left = WorkerExited(
                job=job.number,
                generation=generation,
                node=THIS_NODE,
                rank=process.rank,
                step=job.restored,
                cause=Cause.CHECKPOINT if saved.problem else "",
                detail=detail,
            )
            self._fact(left)

    def adopt(self, job: LocalJob, note: ProgramNote, ended: Callable[[str], Ended | None]) -> bool:
        """Take over what an earlier agent started; ``ended``: what became of one since then.

        False: nothing of it is known any more, as after a restart of the node.
        """
        processes = [job.new_process(index, rank) for index, rank in enumerate(note.ranks)]
        lives = {process.key: self._zygote.children.get(process.key) for process in processes}
        ends = {process.key: ended(process.key) for process in processes}
        if not any(lives.values()) and not any(ends.values()):
            return False
        try:
            job.work = decode_payload(note.payload)
        except PayloadError:
            return False
        job.user, job.generation, job.gpus = note.user, note.generation, note.gpus
        job.restored, job.workers = note.restored, len(note.ranks)
        for process in processes:
            child = lives[process.key] or ends[process.key]
            process.generation, process.adopted = note.generation, True
            process.launched = process.index > 0 and is_launched(job)
            process.pid = child.pid if child is not None else 0
            job.processes[process.index] = process
            fact = WorkerFound(
                job=job.number,
                generation=note.generation,
                rank=process.rank,
                step=note.restored,
                committed=-1,
            )
            self._fact(fact)
        for process in processes:
            unknown = lives[process.key] is None and ends[process.key] is None
            if unknown and not process.launched:
                self._fact(_lost(job, process))
        return True

    async def _start(self, job: LocalJob) -> None:
        work, form = job.work, job.form
        assert isinstance(work, Script) and form is not None
        self._note(job, work)
        host, _, port = job.store.rpartition(":")
        own_port = 0
        if any(process.rank == 0 for process in job.processes.values()):
            own_port = await self._own_store(job)
        for process in list(job.processes.values()):
            if job.processes.get(process.index) is not process:
                continue  # it was stopped while others started
            if process.sent_away:  # before it began
                process.left = True
                self._fact(_left(job, process, "", ""))
                continue
            if process.launched:
                continue
            binding = self._processes.binding(job, process)
            with suppress(OSError):
                process.log_start = job.log(process.index).lstat().st_size
            order = Spawn(
                key=process.key,
                role="program",
                log=str(job.log(process.index)),
                environment={
                    "PYTHONUNBUFFERED": "1",  # what it prints is in its log at once
                    **self._processes.given(job),
                    **self._processes.environment(job, process),
                    **rank_environment(job, process, form),
                    **result_variable(job),
                },
                folder=work.folder or str(job.own_folder),
                user=self._processes.user(job),
                argv=work.argv,
                rank=process.rank,
                store=(host, int(port or 0), job.meeting),
                own_port=own_port,
                launches=launch_place(job, form),
                cores=() if is_launched(job) else binding.cores,
                memory_node=-1 if is_launched(job) else binding.numa,
                containment=self._processes.containment(job),
            )
            await self._zygote.spawn(order, process.started)

    def _note(self, job: LocalJob, work: Script) -> None:
        ranks = tuple(job.processes[index].rank for index in sorted(job.processes))
        note = ProgramNote(
            job=job.number,
            generation=job.generation,
            ranks=ranks,
            payload=encode_payload(work),
            user=job.user,
            gpus=job.gpus,
            restored=job.restored,
        )
        note_program(job.folder, note)

    async def _own_store(self, job: LocalJob) -> int:
        """A store for one generation of a program, hosted outside of its ranks; its port.

        A launcher that hosts one itself gets a port that is free.
        """
        found = recognised(job.work.argv) if isinstance(job.work, Script) else None
        if found is not None and found[0] in OWN_STORE:
            with socket.create_server((self._address, 0)) as free:
                return int(free.getsockname()[1])
        key = f"job{job.number}/store{job.generation}"
        child = await self._zygote.spawn(Spawn(key=key, role="program-store", host=self._address))
        if not job.generation:  # it was stopped while the store came up
            self.end_stores(job.number)
        return child.port

    def store_ended(self, job: LocalJob, end: Ended) -> None:
        """A store is gone: the ranks of its generation, if they still run, meet nowhere any more.

        Some would never notice, others fail by it or wait for minutes: all of them start again.
        """
        if not job.generation or end.key != f"job{job.number}/store{job.generation}":
            return  # it was ended because nobody needs it
        for process in job.processes.values():
            if process.rank == 0 and not process.left and process.status is None:
                process.left = True
                detail = f"the store where its ranks meet was killed (process {end.pid})"
                self._fact(_left(job, process, Cause.WORKER_KILLED, detail))

    async def ended(self, job: int) -> None:
        """Wait until no rank of a job has a process here."""
        ranks = f"job{job}/worker"
        while any(key.startswith(ranks) for key in self._zygote.children):
            await asyncio.sleep(ENDED_POLL_SECONDS)

    def end_stores(self, job: int, but: int = 0) -> None:
        """End the stores of a job's generations; ``but``: that one goes on."""
        for key in list(self._zygote.children):
            if key.startswith(f"job{job}/store") and key != f"job{job}/store{but}":
                self._zygote.signal(key, signal.SIGKILL)


def _lost(job: LocalJob, process: WorkerProcess) -> WorkerExited:
    """A rank ended, and neither agent was told how."""
    process.left = True
    return _left(job, process, Cause.WORKER_KILLED, "it ended while the node had no agent")


def _left(job: LocalJob, process: WorkerProcess, cause: str, detail: str) -> WorkerExited:
    return WorkerExited(
        job=job.number,
        generation=process.generation,
        node=THIS_NODE,
        rank=process.rank,
        step=process.step,
        cause=cause,
        detail=detail,
    )


def is_launched(job: LocalJob) -> bool:
    """Whether the ranks of a program here are started by a launcher of its own."""
    return isinstance(job.work, Script) and recognised(job.work.argv) is not None


def launch_place(job: LocalJob, form: Form) -> tuple[int, int, int]:
    """Where this node stands among those of a launcher; (0, 0, 0): ranks are started one by one."""
    if not is_launched(job):
        return (0, 0, 0)
    local = len(job.processes)
    return job.processes[0].rank // local, len(form.nodes), local


def rank_environment(job: LocalJob, process: WorkerProcess, form: Form) -> dict[str, str]:
    """What a rank gets, or the launcher of a node."""
    environment = torchrun_environment(job, process, form)
    if is_launched(job):
        return {**without_ranks(environment), "PHALANX_LAUNCHED": "1"}
    return environment


def torchrun_environment(job: LocalJob, process: WorkerProcess, form: Form) -> dict[str, str]:
    """What torchrun would give a rank, and what ``phalanx.worker()`` asks for."""
    local = len(job.processes)
    world = str(local * len(form.nodes))
    backed_up = {"PHALANX_SPARE_STORE": f"{job.store}/{job.meeting}"} if form.backup >= 0 else {}
    return {
        "RANK": str(process.rank),
        "WORLD_SIZE": world,
        "LOCAL_RANK": str(process.index),
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_RANK": str(process.rank // local),
        "GROUP_WORLD_SIZE": str(len(form.nodes)),
        "ROLE_RANK": str(process.rank),
        "ROLE_WORLD_SIZE": world,
        "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT": str(job.generation - 1),
        "TORCHELASTIC_RUN_ID": f"phalanx-{job.number}-{job.run_owner[:8]}",
        "PHALANX_GENERATION": str(job.generation),
        "PHALANX_RESTORE_STEP": str(job.restored),
        "PHALANX_BUDDY_SHIFT": str(form.buddy_shift),
        **backed_up,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }

"""What the workers of a node say, and what their end says: facts for the agent's machine."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from functools import partial

import msgspec
from msgspec import structs

from phalanx.checkpoint.keeper.frames import Unframer
from phalanx.cluster.causes import Cause
from phalanx.cluster.protocol.commands import Flush, WorkerOrder
from phalanx.cluster.protocol.messages import (
    THIS_NODE,
    LocalFact,
    NodeNotice,
    Restored,
    Sealed,
    WorkerExited,
    WorkerFound,
    WorkerUp,
)
from phalanx.control.agent.jobs.local_job import LocalJob, WorkerProcess
from phalanx.control.agent.jobs.output_end import described_end
from phalanx.control.agent.jobs.program_result import left_result
from phalanx.control.agent.jobs.wrapper_exits import killed_child, last_output
from phalanx.control.agent.safe_files import Owner, files_as
from phalanx.control.host.users import known_user
from phalanx.control.wire.payload import Script, TrainingWork
from phalanx.control.wire.socket_peer import SocketPeer, peer_of
from phalanx.control.wire.worker_messages import (
    GIVE_WAY,
    Fact,
    LastGeneration,
    Looked,
    Present,
    decode_fact,
)
from phalanx.control.wire.zygote_messages import Ended
from phalanx.control.worker.exit_causes import SHELL, cause_of_signal, explained

log = logging.getLogger("phalanx.agent")

SHELL_TERM = SHELL + signal.SIGTERM
OWN_ENDS = (Cause.USER_ERROR, Cause.SOFTWARE_BUG)  # whose reason is what a program printed last
KNOWN_SECONDS = 2.0  # for the zygote to say whom it has forked
MOST_CONNECTIONS = 256  # of a job's processes here
MOST_FACT_BYTES = 1 << 20
MOST_REFUSALS_TOLD = 20  # of a job, in the agent's log


class WorkerEvents:
    """Listens to the workers of all jobs. ``give_way`` starts another process for a worker;
    ``root_of`` is the process of a job that another one descends from, or 0.
    """

    def __init__(
        self,
        fact: Callable[[LocalFact], None],
        root_of: Callable[[LocalJob, int], int],
        give_way: Callable[[LocalJob, WorkerProcess], None],
    ) -> None:
        self._fact, self._root_of, self._give_way = fact, root_of, give_way
        self.out_of_memory: Callable[[int], str] = lambda pid: ""

    async def listen(self, job: LocalJob, user: str) -> None:
        """Open the socket that the workers of a job come to; its folder is their user's alone."""
        if job.server is not None:
            return
        # Asked for first: where nobody listens yet, the next attempt finds the same fault again.
        entry = known_user(user) if user else None
        owner = Owner(entry.pw_uid, entry.pw_gid) if entry is not None else None
        job.make_folders(owner)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # The folder is the user's, who could put anything in the place of a socket: it is
            # made as theirs, and no right to it is changed afterwards.
            with files_as(owner):
                job.agent_socket.unlink(missing_ok=True)
                listening.bind(str(job.agent_socket))
            meet = partial(self._meet, job)
            job.server = await asyncio.start_unix_server(meet, sock=listening)
        except OSError:
            listening.close()
            raise

    async def _meet(
        self, job: LocalJob, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        unframer, process = Unframer(MOST_FACT_BYTES), None
        job.connections += 1
        try:
            pid = await self._recognise(job, peer_of(writer.get_extra_info("socket")))
            while data := await reader.read(1 << 16):
                for body in unframer.feed(data):
                    fact = decode_fact(body)
                    if fact.job != job.number:
                        raise PermissionError(f"process {pid} speaks for job {fact.job}")
                    if isinstance(fact, Present):
                        process = self._present(job, structs.replace(fact, pid=pid), writer)
                    elif process is not None:
                        self._heard(process, fact)
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            job.refused += 1
            if job.refused <= MOST_REFUSALS_TOLD:
                log.warning("job %d: a worker's words are refused: %s", job.number, error)
        except asyncio.CancelledError:
            return  # the agent ends, and asyncio would print a traceback for every worker
        finally:
            job.connections -= 1
            writer.close()
            if process is not None and process.writer is writer:
                process.writer = None
                self._report_unexplained_exit(job, process)

    async def _recognise(self, job: LocalJob, peer: SocketPeer) -> int:
        """The process of the job that speaks; PermissionError where it is somebody else's."""
        if job.connections > MOST_CONNECTIONS:
            raise PermissionError(f"there are {MOST_CONNECTIONS} connections already")
        own = os.geteuid()
        if peer.uid not in (own, job.owner.uid if job.owner is not None else own):
            raise PermissionError(f"process {peer.pid} is user {peer.uid}'s")
        # The zygote may not have told us yet of a process that it has just forked.
        for _ in range(int(KNOWN_SECONDS / 0.02)):
            if root := self._root_of(job, peer.pid):
                return root
            await asyncio.sleep(0.02)
        raise PermissionError(f"process {peer.pid} is not one of the job's")

    def _present(self, job: LocalJob, fact: Present, writer: asyncio.StreamWriter) -> WorkerProcess:
        process = job.find(fact.pid)
        if process is not None and fact.index in job.processes:
            process = job.processes[fact.index] if job.processes[fact.index].launched else process
        outlived = process is None or process.adopted  # the agent before this one started it
        if process is None:
            expected = job.processes.get(fact.index)
            if expected is not None and not expected.pid:
                process, outlived = expected, False  # the zygote has not told us yet who it is
            else:
                if expected is not None or fact.generation <= 0:
                    log.warning("job %d: process %d is not expected", job.number, fact.pid)
                process = job.new_process(fact.index, fact.rank)
                process.generation = fact.generation
                job.processes[fact.index] = process
        process.pid, process.writer, process.step = fact.pid, writer, fact.step
        if fact.running:
            job.generation = max(job.generation, fact.generation)
            if process.take is None and outlived:
                adopted = WorkerFound(
                    job=job.number,
                    generation=fact.generation,
                    rank=fact.rank,
                    step=fact.step,
                    committed=fact.committed,
                    durable=fact.durable,
                )
                self._fact(adopted)
        if process.take is not None and process.take.formation.generation > fact.generation:
            process.say(process.take)
            for order in job.orders:
                process.say(order)
        return process

    def _heard(self, process: WorkerProcess, fact: Fact) -> None:
        match fact:
            case WorkerUp():
                process.answered = True
            case Restored():
                process.restored = True
            case Sealed():
                process.step = fact.step
            case WorkerExited():
                process.left = True
                if not fact.generation:  # it never came so far as to know its place
                    fact = structs.replace(fact, generation=process.generation, rank=process.rank)
            case LastGeneration():
                process.last_generation = fact.generation or process.generation
            case Looked():
                process.looked = fact
        if not isinstance(fact, Present | Looked | LastGeneration):
            self._fact(fact)

    def ended(self, job: LocalJob, end: Ended) -> None:
        """The zygote says that a process of a job is gone."""
        process = job.find(end.pid)
        if process is None:
            return
        process.status, process.ended_why = end.status, end.why
        if job.standbys.get(process.index) is process:
            log.warning("job %d: a standby ended (%d)", job.number, end.status)
            del job.standbys[process.index]
        elif end.status == GIVE_WAY and process.take is not None:
            process.left = True
            # One that never got out of an older generation: its place in the new one is free.
            if not process.restored:
                self._give_way(job, process)
        elif process.take is not None and 0 < process.last_generation < process.generation:
            # It had said why it ends before it was given this place: that is no news.
            process.left = True
            self._give_way(job, process)
        else:
            self._report_unexplained_exit(job, process)

    def _report_unexplained_exit(self, job: LocalJob, process: WorkerProcess) -> None:
        """A process is gone and all its words are read: if none of them explained it, we do."""
        if process.status is None or process.writer is not None or process.left:
            return
        process.left = True
        cause, detail = explained(process.status, ours=isinstance(job.work, TrainingWork))
        if process.sent_away and process.status in (-signal.SIGTERM, SHELL_TERM):
            cause = detail = ""  # as it was asked to
        ended_by, pid = -process.status, process.pid
        output = self._output(job, process) if cause else ""
        child = killed_child(output) if cause == Cause.USER_ERROR else None
        if child is None and cause in OWN_ENDS and (explanation := described_end(output)):
            detail = f"{detail}: {explanation}"
        if child is not None:
            ended_by, pid = child.number, child.pid
            cause = cause_of_signal(ended_by)
            which = f"process {pid}, which it had started," if pid else "a process of it"
            detail = f"{detail}: {which} was ended by {child.number.name}"
        if process.ended_why:
            detail = process.ended_why
        elif ended_by == signal.SIGKILL and (explanation := self.out_of_memory(pid)):
            cause, detail = Cause.HOST_OUT_OF_MEMORY, explanation
        left = WorkerExited(
            job=job.number,
            generation=process.generation,
            node=THIS_NODE,
            rank=process.rank,
            step=process.step,
            cause=cause,
            detail=detail,
            result=left_result(job, process) if not cause else "",
        )
        self._fact(left)
        for other in [] if cause else job.processes.values():
            if other.launched and process.index == 0 and not other.left:
                other.left = True
                self._fact(structs.replace(left, rank=other.rank, step=other.step))

    def _output(self, job: LocalJob, process: WorkerProcess) -> str:
        """The end of what a program printed; our own trainer says itself why it ends."""
        if not isinstance(job.work, Script):
            return ""
        return last_output(job.log(process.index), process.log_start)


def at_server_time(fact: LocalFact, skew_ns: int) -> LocalFact:
    """A fact with its time as the server's clock would tell it."""
    match fact:
        case Sealed():
            return structs.replace(fact, at_ns=fact.at_ns + skew_ns)
        case NodeNotice():
            return structs.replace(fact, deadline_ns=fact.deadline_ns + skew_ns)
        case _:
            return fact


def at_own_time(order: WorkerOrder, skew_ns: int) -> WorkerOrder:
    """An order with its time as this machine's clock tells it, which workers look at."""
    if isinstance(order, Flush):
        return structs.replace(order, until_ns=order.until_ns - skew_ns)
    return order

"""What people ask a node for beside logs: ranks' records of some steps, traces, and stacks."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from pathlib import Path

import msgspec

from phalanx.control.agent.inspect.evidence import seen_text
from phalanx.control.agent.jobs.jobs import NodeJobs
from phalanx.control.agent.jobs.local_job import LocalJob
from phalanx.control.agent.safe_files import open_regular
from phalanx.control.wire.agent_messages import LogPart, ReadEvidence, ReadSteps, ReadTrace
from phalanx.observe.node.worker_ring import RingRecords, ring_path

PART_BYTES = 64 << 10
PIECE_BYTES = 4 << 20
TRACE = re.compile(r"trace-step-\d+-rank-(\d+)\.json")


class DetailReader:
    """Answers out of files; ``send`` takes the parts, ``skew_ns`` is added to our clock's times."""

    def __init__(
        self,
        node_jobs: NodeJobs,
        send: Callable[[msgspec.Struct], None],
        skew_ns: Callable[[], int],
    ) -> None:
        self._jobs, self._send, self._skew_ns = node_jobs.jobs, send, skew_ns
        self._folder = node_jobs.state / "jobs"
        self._answering: set[asyncio.Task[None]] = set()

    def hear(self, order: ReadSteps | ReadTrace | ReadEvidence) -> None:
        """Somebody wants to know."""
        task = asyncio.ensure_future(self._answer(order))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, order: ReadSteps | ReadTrace | ReadEvidence) -> None:
        if isinstance(order, ReadEvidence):  # of jobs that have ended here, too
            folder = self._folder / str(order.job)
            text = await asyncio.to_thread(seen_text, folder, order.generation, order.rank)
            self._send_text(order.request, text)
            return
        job = self._jobs.get(order.job)
        if job is None:
            problem = f"job {order.job} does not run here"
            self._send(LogPart(request=order.request, end=True, problem=problem))
        elif isinstance(order, ReadTrace):
            self._send(await asyncio.to_thread(self._trace, job, order))
        else:
            self._send_text(order.request, await asyncio.to_thread(self._steps, job, order))

    def _send_text(self, request: int, data: bytes) -> None:
        for at in range(0, len(data), PART_BYTES):
            self._send(LogPart(request=request, data=data[at : at + PART_BYTES]))
        self._send(LogPart(request=request, end=True))

    def _steps(self, job: LocalJob, order: ReadSteps) -> bytes:
        lines: list[bytes] = []
        for index, process in sorted(job.processes.items()):
            if order.rank not in (-1, process.rank):
                continue
            for said in RingRecords(ring_path(job.sockets, index)).history():
                if order.first <= said.record.step <= order.last:
                    time_ns = said.time_ns + self._skew_ns()
                    body = {"time_ns": time_ns, **msgspec.to_builtins(said.record)}
                    lines.append(msgspec.json.encode(body))
        return b"".join(line + b"\n" for line in lines)

    def _trace(self, job: LocalJob, order: ReadTrace) -> LogPart:
        worker = next(
            (process for process in job.processes.values() if process.rank == order.rank), None
        )
        path = newest_trace(
            Path(order.folder) / "logs", order.rank, order.after_ns - self._skew_ns()
        )
        if worker is None or path is None:
            return LogPart(request=order.request, problem="there is no such trace yet")
        try:
            # Whose trace this is may name any folder: only what is the worker's own is read.
            owner = job.owner.uid if job.owner is not None else os.geteuid()
            file = open_regular(path, owner=owner)
            try:
                status = os.fstat(file)
                if status.st_uid != owner:
                    raise PermissionError("the trace is not the worker's own")
                data = os.pread(file, PIECE_BYTES, order.offset)
            finally:
                os.close(file)
        except OSError as error:
            return LogPart(request=order.request, problem=f"the trace cannot be read: {error}")
        end = order.offset + len(data) >= status.st_size
        return LogPart(request=order.request, data=data, end=end)


def newest_trace(logs: Path, rank: int, after_ns: int) -> Path | None:
    """The newest trace of a rank that is not older than a time."""
    traces: list[tuple[int, Path]] = []
    try:
        for entry in os.scandir(logs):
            named = TRACE.fullmatch(entry.name)
            if named and int(named[1]) == rank:
                traces.append((entry.stat(follow_symlinks=False).st_mtime_ns, Path(entry.path)))
    except OSError:
        return None
    time_ns, path = max(traces, default=(0, None))
    return path if time_ns >= after_ns else None

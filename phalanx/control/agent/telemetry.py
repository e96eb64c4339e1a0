"""The agent's side of metrics: reads the rings of its workers, merges, and tells the server.

Nothing here holds up a worker, and nothing is kept for a server that is away: rings hold the last
records until it is back, and what they cannot hold is counted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from phalanx.cluster.protocol.messages import StepsPrinted
from phalanx.control.agent.jobs.local_job import LocalJob
from phalanx.control.agent.jobs.printed_log import PrintedLog, first_rank, log_of
from phalanx.observe.node.node_messages import NodeRecords
from phalanx.observe.node.node_records import DETAIL_WORLD, TimedRecord, merge
from phalanx.observe.node.node_sample import NodeSample, Sampler
from phalanx.observe.node.worker_ring import RingRecords, ring_path
from phalanx.train.report.records import StepRecord

SMALL_SECONDS, LARGE_SECONDS = 1.0, 5.0  # between two reports, by the size of the gang
SAMPLE_SECONDS = 10.0  # between two looks at the node's devices
PRINTED_NS = 5_000_000_000  # between two words about printed steps
LATE_NS = 5_000_000_000  # a rank that has not told of a step by then will not


class JobTelemetry:
    """The rings of one job on this node."""

    def __init__(self, job: LocalJob) -> None:
        self.job = job
        self.generation = job.generation
        self.rings: dict[int, RingRecords] = {}
        self.waiting: dict[
            int, list[TimedRecord]
        ] = {}  # by rank: steps that others here have not told of
        self.due = 0.0
        self.printed: PrintedLog | None = None  # of a program that reports nothing itself
        self.printed_due_ns = 0

    @property
    def world(self) -> int:
        form = self.job.form
        if form is None:
            return 0
        return form.world or len(form.nodes) * (form.slot_gpus or 1)

    def collect(self, node: int, now_ns: int, skew_ns: int, *, last: bool) -> NodeRecords | None:
        """What is new; ``last``: nothing will follow, so nothing waits for company."""
        if self.job.generation != self.generation:
            self.generation, self.waiting = self.job.generation, {}
        lost = refused = 0
        for index, process in self.job.processes.items():
            ring = self.rings.get(index)
            if ring is None:
                ring = self.rings[index] = RingRecords(ring_path(self.job.sockets, index))
            said = ring.read(self.generation, now_ns - skew_ns)
            self.waiting.setdefault(process.rank, []).extend(
                TimedRecord(time_ns + skew_ns, record) for time_ns, record in said
            )
            lost, ring.lost_bytes = lost + ring.lost_bytes, 0
            refused, ring.refused = refused + ring.refused, 0
        self._read_printed(now_ns)
        ready = self._ready(now_ns, last)
        return merge(
            node,
            self.job.number,
            self.generation,
            ready,
            summary=self.world > DETAIL_WORLD,
            lost_bytes=lost,
            refused=refused,
        )

    def _read_printed(self, now_ns: int) -> None:
        process = first_rank(self.job)
        if process is not None:
            self.printed = log_of(self.job, process, self.printed)
            self.waiting.setdefault(0, []).extend(self.printed.read(now_ns))

    def printed_steps(self, node: int, now_ns: int, *, last: bool) -> StepsPrinted | None:
        """How far a program is by what it prints, every few seconds."""
        if self.printed is None or (now_ns < self.printed_due_ns and not last):
            return None
        told = self.printed.told(node, now_ns)
        if told is not None:
            self.printed_due_ns = now_ns + PRINTED_NS
        return told

    def _ready(self, now_ns: int, last: bool) -> dict[int, list[TimedRecord]]:
        """Steps that every rank here has told of, or that are late; the rest waits."""
        latest = [
            max((said.record.step for said in waiting), default=0)
            for waiting in self.waiting.values()
        ]
        until = min(latest, default=0)
        ready: dict[int, list[TimedRecord]] = {}
        for rank, waiting in self.waiting.items():
            leave = [
                last
                or not isinstance(said.record, StepRecord)
                or said.record.step <= until
                or now_ns - said.time_ns > LATE_NS
                for said in waiting
            ]
            ready[rank] = [said for said, go in zip(waiting, leave, strict=True) if go]
            self.waiting[rank] = [said for said, go in zip(waiting, leave, strict=True) if not go]
        return ready

    def close(self) -> None:
        for ring in self.rings.values():
            ring.close()


class Telemetry:
    """All jobs of a node. ``send`` takes messages for the server while there is one."""

    def __init__(
        self,
        jobs: dict[int, LocalJob],
        send: Callable[[NodeRecords | NodeSample | StepsPrinted], None],
        clock: Callable[[], tuple[int, int, int]],
        sampler: Sampler | None = None,
    ) -> None:
        self._jobs, self._send, self._sampler = jobs, send, sampler
        self.gpus: dict[str, tuple[float, ...]] = {}  # by metric, as last sampled
        self._sample_due = 0.0
        self._clock = clock  # our number as a node (-1: not connected), the time, our skew
        self._known: dict[int, JobTelemetry] = {}

    async def run(self) -> None:
        """Look at the rings until cancelled."""
        while True:
            await asyncio.sleep(SMALL_SECONDS / 2)
            for job in list(self._jobs):
                self.collect(job)
            for job in [job for job in self._known if job not in self._jobs]:
                self._known.pop(job).close()
            if self._sampler is not None and time.monotonic() >= self._sample_due:
                self._sample_due = time.monotonic() + SAMPLE_SECONDS
                await self._sample(self._sampler)

    async def _sample(self, sampler: Sampler) -> None:
        """A look at the node, in a thread: a driver may take its time."""
        host, gpus = await asyncio.to_thread(sampler.look)
        self.gpus = gpus
        node, now_ns, _ = self._clock()
        if node >= 0:
            self._send(NodeSample(node=node, time_ns=now_ns, host=host, gpus=gpus))

    def collect(self, number: int, *, last: bool = False) -> None:
        """Tell the server what is new of a job, if its turn has come."""
        node, now_ns, skew_ns = self._clock()
        job = self._jobs.get(number)
        if node < 0 or job is None:
            return
        telemetry = self._known.setdefault(number, JobTelemetry(job))
        now = time.monotonic()
        if now < telemetry.due and not last:
            return
        telemetry.due = now + (LARGE_SECONDS if telemetry.world > DETAIL_WORLD else SMALL_SECONDS)
        message = telemetry.collect(node, now_ns, skew_ns, last=last)
        for each in (message, telemetry.printed_steps(node, now_ns, last=last)):
            if each is not None:
                self._send(each)

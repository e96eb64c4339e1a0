"""The output of a program's first rank, read for the steps that it prints."""

from __future__ import annotations

import os
from collections.abc import Iterator

from phalanx.cluster.protocol.messages import StepsPrinted
from phalanx.control.agent.jobs.local_job import LocalJob, WorkerProcess
from phalanx.control.agent.safe_files import open_regular
from phalanx.control.wire.payload import Script
from phalanx.observe.node.node_records import TimedRecord
from phalanx.observe.node.printed_steps import PrintedStep, StepLines, step_record

READ_BYTES = 1 << 20  # at a time: whoever floods its log is read late


class PrintedLog:
    """What one start of a program prints, from where its output begins in the log."""

    def __init__(self, job: LocalJob, process: WorkerProcess) -> None:
        self._job, self._generation = job, process.generation
        self._rank, self._path = process.rank, job.log(process.index)
        self._offset = process.log_start
        self._lines = StepLines()
        self._last: tuple[int, int] = (0, 0)  # step, and when it was read
        self.newest: PrintedStep | None = None

    def of(self, process: WorkerProcess) -> bool:
        """Whether it is this start's."""
        return process.generation == self._generation and process.rank == self._rank

    def read(self, now_ns: int) -> list[TimedRecord]:
        """Steps that were printed since; they are as old as the look at them."""
        found = self._lines.feed(self._more())
        return list(self._records(found, now_ns))

    def _records(self, steps: list[PrintedStep], now_ns: int) -> Iterator[TimedRecord]:
        if not steps:
            return
        step, read_ns = self._last
        each_ns = (now_ns - read_ns) // max(1, steps[-1].step - step) if step else 0
        for printed in steps:
            at_ns = now_ns - (steps[-1].step - printed.step) * each_ns
            if each_ns > 0:  # nobody knows when the first one began
                record = step_record(
                    printed, self._job.number, self._generation, self._rank, each_ns / 1e9
                )
                yield TimedRecord(at_ns, record)
        self._last, self.newest = (steps[-1].step, now_ns), steps[-1]

    def _more(self) -> str:
        try:
            file = open_regular(self._path)
        except OSError:
            return ""
        try:
            size = os.fstat(file).st_size
            if size < self._offset:  # it was cut meanwhile
                self._offset = size
            data = os.pread(file, READ_BYTES, self._offset)
            self._offset += len(data)
            return data.decode(errors="replace")
        finally:
            os.close(file)

    def told(self, node: int, at_ns: int) -> StepsPrinted | None:
        """The newest step, for the server, once."""
        newest, self.newest = self.newest, None
        if newest is None:
            return None
        return StepsPrinted(
            node=node,
            job=self._job.number,
            generation=self._generation,
            step=newest.step,
            steps=max(newest.steps, newest.step) if newest.steps else 0,
            at_ns=at_ns,
        )


def first_rank(job: LocalJob) -> WorkerProcess | None:
    """The process that speaks for a program which reports nothing itself; None: none does here."""
    process = next((each for each in job.processes.values() if each.rank == 0), None)
    reports = any(each.writer is not None for each in job.processes.values())
    if process is None or not process.pid or reports or not isinstance(job.work, Script):
        return None
    return process


def log_of(job: LocalJob, process: WorkerProcess, known: PrintedLog | None) -> PrintedLog:
    """The log of this start: the one that is being read, or a new one."""
    return known if known is not None and known.of(process) else PrintedLog(job, process)

"""Runs all loads of a burn-in at the same time, and watches the GPUs meanwhile.

Loads are forked: torch is loaded once, and a process has one load. They end with this process, or
when it kills them; what was measured until then counts.
"""

from __future__ import annotations

import os
import selectors
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from phalanx.config.errors import first_line
from phalanx.doctor.acceptance.dcgm import run_diagnostic
from phalanx.doctor.acceptance.judge import judge
from phalanx.doctor.acceptance.loads import LoadOrder, LoadSample, plan_loads, samples_of
from phalanx.doctor.acceptance.report import AcceptanceReport, AcceptanceRequest
from phalanx.doctor.acceptance.soak import LoadSeries, SoakSeries
from phalanx.doctor.finding import Finding
from phalanx.hardware import count_cuda

START_SECONDS = 180.0  # for all loads to say their first word
SAMPLE_SECONDS = 1.0
SAY_SECONDS = 10.0
PIECE_BYTES = 65_536
KILLED_SECONDS, POLL_SECONDS = 20.0, 0.02  # that a killed process has for its end


class LoadProcess(NamedTuple):
    """A load that runs."""

    order: LoadOrder
    pid: int
    reads: int  # end of the pipe that it tells into


class BurnIn:
    """One burn-in of this machine."""

    def __init__(self, request: AcceptanceRequest, say: Callable[[str], None]) -> None:
        self._request, self._say = request, say
        self._interval = min(SAMPLE_SECONDS, request.seconds / 10)
        cpus = len(os.sched_getaffinity(0))
        self._orders = plan_loads(request, count_cuda(), cpus)
        self._series = {order: LoadSeries() for order in self._orders if order.tells}
        self._rest: dict[int, bytes] = {}
        self._soak: SoakSeries | None = None
        self._began = 0.0  # monotonic; 0: not all loads have said their first word
        self._ended = 0.0

    def run(self) -> AcceptanceReport:
        """Until its time is over or somebody interrupts it."""
        began_ns, findings = time.time_ns(), list[Finding]()
        try:
            if self._request.dcgm_level:
                self._say(f"dcgmi diag -r {self._request.dcgm_level}")
                findings = run_diagnostic(self._request.dcgm_level)
            # What loads leave behind when they are killed goes with these folders.
            with (
                tempfile.TemporaryDirectory(prefix="phalanx-accept-") as meeting,
                tempfile.TemporaryDirectory(prefix=".doctor-", dir=self._request.folder) as disk,
            ):
                self._run(Path(meeting), Path(disk))
        except KeyboardInterrupt:
            self._say("interrupted: what follows was measured until now")
        return self._report(began_ns, findings)

    def _run(self, meeting: Path, disk: Path) -> None:
        processes: list[LoadProcess] = []
        try:
            processes.extend(self._fork(order, meeting / "store", disk) for order in self._orders)
            self._soak = SoakSeries()  # after the forks: NVML makes threads
            self._watch(processes)
        finally:
            self._ended = time.monotonic()
            for order in end_all(processes):
                series = self._series.get(order) or self._of_rank(order)
                series.problem = series.problem or "it hangs in the kernel, where no signal ends it"

    def _fork(self, order: LoadOrder, store: Path, disk: Path) -> LoadProcess:
        reads, writes = os.pipe()
        pid = os.fork()
        if pid:
            os.close(writes)
            return LoadProcess(order, pid, reads)
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            silence = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silence, 1)
            os.dup2(silence, 2)
            os.close(reads)
            _work(order, disk, store, self._interval, writes)
        finally:
            os._exit(0)

    def _watch(self, processes: list[LoadProcess]) -> None:
        started = said = time.monotonic()
        with selectors.DefaultSelector() as selector:
            for process in processes:
                selector.register(process.reads, selectors.EVENT_READ, process)
            while True:
                for key, _ in selector.select(self._interval / 2):
                    self._read(selector, key.data)
                now = time.monotonic()
                if not self._began and self._all_began():
                    self._began = said = now
                    self._say(f"{len(processes)} processes work together from here on")
                if not self._began and now - started > START_SECONDS:
                    self._give_up()
                    return
                assert self._soak is not None
                if self._began:
                    self._soak.look(now)
                if self._began and now - self._began >= self._request.seconds:
                    return
                if self._began and now - said >= SAY_SECONDS:
                    said = now
                    self._say(self._progress(now))

    def _all_began(self) -> bool:
        return all(series.told for series in self._series.values())

    def _give_up(self) -> None:
        for series in self._series.values():
            if not series.told:
                series.problem = f"it did not begin within {START_SECONDS:.0f} s"

    def _read(self, selector: selectors.BaseSelector, process: LoadProcess) -> None:
        data = os.read(process.reads, PIECE_BYTES)
        if not data:
            selector.unregister(process.reads)
            series = self._series.get(process.order)
            if series is not None and not series.problem:
                series.problem = "its process ended"
            return
        *lines, rest = (self._rest.get(process.reads, b"") + data).split(b"\n")
        self._rest[process.reads] = rest
        for line in lines:
            sample = msgspec.json.decode(line, type=LoadSample)
            series = self._series.get(process.order)
            if series is None and sample.problem:  # a rank that does not tell, but broke
                series = self._of_rank(process.order)
            if series is not None:
                series.take(sample, time.monotonic(), counts=bool(self._began))

    def _of_rank(self, order: LoadOrder) -> LoadSeries:
        return next(s for o, s in self._series.items() if o.load == order.load)

    def _progress(self, now: float) -> str:
        rates = [f"{o.load} {o.device} {s.last_rate:.3g}" for o, s in self._series.items()]
        return f"{now - self._began:.0f} s of {self._request.seconds:.0f}: " + ", ".join(rates)

    def _report(self, began_ns: int, findings: list[Finding]) -> AcceptanceReport:
        wanted = self._request.seconds
        seconds = min(wanted, self._ended - self._began) if self._began else 0.0
        figures = [
            series.figures(order.load, order.device, wanted, ended_at=self._ended)
            for order, series in self._series.items()
        ]
        gpus = self._soak.figures() if self._soak is not None else []
        return AcceptanceReport(
            node=self._request.node,
            began_ns=began_ns,
            seconds=seconds,
            wanted_seconds=wanted,
            loads=figures,
            gpus=gpus,
            findings=[*findings, *judge(figures, gpus)],
        )


def end_all(processes: list[LoadProcess]) -> list[LoadOrder]:
    """Kill all loads; those that do not end, as their device hangs, are not waited for."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    left, deadline = list(processes), time.monotonic() + KILLED_SECONDS
    while left and time.monotonic() < deadline:
        left = [process for process in left if os.waitpid(process.pid, os.WNOHANG) == (0, 0)]
        if left:
            time.sleep(POLL_SECONDS)
    for process in processes:
        os.close(process.reads)
    return [process.order for process in left]


def _work(order: LoadOrder, folder: Path, store: Path, interval: float, writes: int) -> None:
    """In the child: tell how fast it is until nobody reads any more."""
    try:
        for rate in samples_of(order, folder, store, interval):
            _tell(writes, LoadSample(abs(rate), int(rate < 0)))
    except BrokenPipeError:
        return
    except Exception as error:  # a device that throws is what a burn-in looks for
        problem = f"{type(error).__name__}: {first_line(error)[:300]}"
        _tell(writes, LoadSample(0.0, 0, problem))


def _tell(writes: int, sample: LoadSample) -> None:
    os.write(writes, msgspec.json.encode(sample) + b"\n")


def burn_in(
    request: AcceptanceRequest, say: Callable[[str], None] = lambda _: None
) -> AcceptanceReport:
    """Load this machine and say what it reached; SIGINT ends it early with what is known."""
    import torch  # noqa: F401  before the forks, so that it is loaded once

    return BurnIn(request, say).run()

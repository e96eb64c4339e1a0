"""Where the time of a step goes, measured without making the host wait for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter, thread_time
from typing import Any, Literal, NamedTuple

import torch

from phalanx.train.measure.device_clock import DeviceClock, Mark
from phalanx.train.measure.sends import Sends
from phalanx.train.measure.waits import PeerWaits, ThreadWaits
from phalanx.train.report.records import SendTimes, StepParts

Phase = Literal[
    "data",
    "verification",
    "forward",
    "backward",
    "optimizer",
    "snapshot",
    "tracing",
    "report",
    "device",
]

# In these the host itself waits, so the host's clock is the one that counts.
HOST_PHASES = frozenset({"data", "snapshot", "tracing", "report", "device"})


class StepTime(NamedTuple):
    """Seconds of one step and of its phases."""

    seconds: float
    parts: StepParts
    sends: SendTimes | None = None


class StepTimer:
    """Times the phases of each step; ``drain`` gives the finished steps.

    On CUDA a phase is bracketed by two events on the current stream, and so is each wait for peers.
    They are read when the device has passed them; only ``drain``, which the loop calls at the log
    interval after its one transfer to the host, waits for the last ones.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        peer_waits: bool = False,
        device_clock: DeviceClock | None = None,
    ) -> None:
        if device.type == "cuda" and device_clock is None:
            device_clock = DeviceClock()
        self._device = device_clock
        self._host = perf_counter if device_clock is None else device_clock.host
        self._waits = PeerWaits() if peer_waits and device_clock is None else None
        self._sends = Sends(on_device=device_clock is not None) if peer_waits else None
        self._watches = peer_waits
        if device_clock is not None and peer_waits:
            device_clock.watch_waits()
        self._open: list[tuple[str, _Mark, _Mark]] = []
        self._closed: list[_Closed] = []
        self._read: list[StepTime] = []  # not drained yet
        self._started = self._mark()

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Attribute what runs inside to a phase; a phase may occur many times in a step."""
        mark = self._host if name in HOST_PHASES else self._mark
        with _range(name, on_device=self._device is not None):
            before, worked = mark(), thread_time()
            try:
                yield
            finally:
                self._open.append((name, before, mark()))
                if self._waits is not None and name in HOST_PHASES:
                    self._waits.leave_out(thread_time() - worked)

    def wait_begins(self) -> Any:
        """Peers are waited for from here on, where no hook sees it; for ``wait_ends``."""
        watcher = self._waits if self._device is None else self._device
        return watcher.wait_begins() if watcher is not None and self._watches else None

    def wait_ends(self, begun: Any) -> None:
        """Their results are there, or the device waits for them."""
        watcher = self._waits if self._device is None else self._device
        if watcher is not None and begun is not None:
            watcher.wait_ends(begun)

    def so_far(self, name: Phase) -> float:
        """Seconds of a phase within the step that is under way; only of the host's phases."""
        assert name in HOST_PHASES
        return sum(_seconds(start, end) for each, start, end in self._open if each == name)

    def restart(self) -> None:
        """The next step begins now: what passed since the last one (a validation) is not its."""
        if self._device is not None:
            self._device.release(self._device.take())
        self._started = self._mark()
        if self._waits is not None:
            self._waits.take()
        if self._sends is not None:
            self._sends.take()

    def close_step(self) -> None:
        """The step ends here and the next one begins."""
        now = self._mark()
        waited = self._waits.take() if self._waits is not None else None
        sends = self._sends.take() if self._sends is not None else None
        marks = self._device.take() if self._device is not None else []
        self._read_passed()
        self._closed.append(_Closed(self._started, now, self._open, marks, waited, sends))
        self._open = []
        self._started = self._mark()

    def drain(self) -> list[StepTime]:
        """Times of the steps closed since the last call; waits for the device at most once."""
        if self._closed and self._device is not None:
            self._device.wait(self._closed[-1].marks[-1])
        self._read += [self._resolve(step) for step in self._closed]
        times, self._closed, self._read = self._read, [], []
        return times

    def _mark(self) -> _Mark:
        return self._host() if self._device is None else self._device.mark()

    def _read_passed(self) -> None:
        """Read steps that the device is done with: their events serve the next ones."""
        clock = self._device
        while clock is not None and self._closed and clock.passed(self._closed[0].marks[-1]):
            self._read.append(self._resolve(self._closed.pop(0)))

    def _resolve(self, step: _Closed) -> StepTime:
        device_times = self._device.read(step.marks) if self._device is not None else None
        totals: dict[str, float] = {}
        for name, start, end in step.phases:
            totals[name] = totals.get(name, 0.0) + _seconds(start, end)
        tracing, reporting = totals.pop("tracing", 0.0), totals.pop("report", 0.0)
        catching_up = totals.pop("device", 0.0)
        beside = totals.get("data", 0.0) + totals.get("snapshot", 0.0) + reporting
        if device_times is not None:
            # Starting and reading a trace is no part of the step that it looks at.
            seconds = device_times.seconds - tracing
            if not self._watches:
                return StepTime(seconds, StepParts(**totals))
            paced = max(0.0, device_times.paced - tracing)
            exposed = min(beside, paced)  # else the device had enough to do meanwhile
            own = max(0.0, seconds - device_times.waited - exposed)
            parts = StepParts(
                **totals,
                peer_wait=device_times.waited,
                own=own,
                host=paced - exposed,
                launch=max(0.0, device_times.host_seconds - beside - catching_up - tracing),
            )
            return StepTime(seconds, parts, step.sends)
        seconds = _seconds(step.before, step.after) - tracing
        if step.waits is None:
            return StepTime(seconds, StepParts(**totals))
        waits = step.waits
        # Some of the waiting for cores happened within collectives and would count twice; what was
        # calculated on a core is the rank's own in any case.
        own = max(waits.working, seconds - waits.peers - beside - waits.cores)
        parts = StepParts(**totals, peer_wait=waits.peers, own=own)
        return StepTime(seconds, parts, step.sends)


_Mark = float | Mark


class _Closed(NamedTuple):
    """A step whose marks have not been read."""

    before: _Mark
    after: _Mark
    phases: list[tuple[str, _Mark, _Mark]]
    marks: list[Mark]  # of the device: all of the step, in order
    waits: ThreadWaits | None
    sends: SendTimes | None


def _seconds(start: _Mark, end: _Mark) -> float:
    if isinstance(start, Mark) and isinstance(end, Mark):
        return end.at - start.at
    assert isinstance(start, float) and isinstance(end, float)
    return end - start


@contextmanager
def _range(name: str, *, on_device: bool) -> Iterator[None]:
    """A phase as a range, for whoever traces the step: NVTX on a device, torch's own in a trace."""
    with ExitStack() as ranges:
        if on_device:
            torch.cuda.nvtx.range_push(name)
            ranges.callback(torch.cuda.nvtx.range_pop)
        if torch.autograd.profiler._is_profiler_enabled:
            ranges.enter_context(torch.profiler.record_function(name))
        yield

"""Where the time of a step goes, measured without making the host wait for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter, thread_time
from typing import Literal, NamedTuple

import torch

from phalanx.train.measure.waits import PeerWaits, ThreadWaits
from phalanx.train.report.records import StepParts

Phase = Literal[
    "data", "verification", "forward", "backward", "optimizer", "snapshot", "tracing", "report"
]

# In these the host itself waits, so the host's clock is the one that counts.
HOST_PHASES = frozenset({"data", "snapshot", "tracing", "report"})


class StepTime(NamedTuple):
    """Seconds of one step and of its phases."""

    seconds: float
    parts: StepParts


class StepTimer:
    """Times the phases of each step; ``drain`` gives the finished steps.

    On CUDA a phase is bracketed by two events on the current stream and nothing waits for them
    until ``drain``, which the loop calls at the log interval after its one transfer to the host.
    """

    def __init__(self, device: torch.device, *, peer_waits: bool = False) -> None:
        self._waits = PeerWaits() if peer_waits and device.type == "cpu" else None
        self._clock: _HostClock | _CudaClock = (
            _CudaClock() if device.type == "cuda" else _HostClock()
        )
        self._started = self._clock.mark()
        self._open: list[tuple[str, _Mark, _Mark]] = []
        self._closed: list[_Closed] = []

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Attribute what runs inside to a phase; a phase may occur many times in a step."""
        clock = _HOST_CLOCK if name in HOST_PHASES else self._clock
        with self._clock.range(name):
            before, worked = clock.mark(), thread_time()
            try:
                yield
            finally:
                self._open.append((name, before, clock.mark()))
                if self._waits is not None and name in HOST_PHASES:
                    self._waits.leave_out(thread_time() - worked)

    def so_far(self, name: Phase) -> float:
        """Seconds of a phase within the step that is under way; only of the host's phases."""
        assert name in HOST_PHASES
        spans = [(start, end) for each, start, end in self._open if each == name]
        return sum(_HOST_CLOCK.seconds(start, end) for start, end in spans)

    def restart(self) -> None:
        """The next step begins now: what passed since the last one (a validation) is not its."""
        self._clock.release(self._started)
        self._started = self._clock.mark()
        if self._waits is not None:
            self._waits.take()

    def close_step(self) -> None:
        """The step ends here and the next one begins."""
        now = self._clock.mark()
        waited = self._waits.take() if self._waits is not None else None
        self._closed.append(_Closed(self._started, now, self._open, waited))
        self._open = []
        self._started = self._clock.mark()

    def drain(self) -> list[StepTime]:
        """Times of the steps closed since the last call; waits for the device at most once."""
        if self._closed:
            self._clock.wait(self._closed[-1].after)
        times = [self._resolve(step) for step in self._closed]
        self._closed = []
        return times

    def _resolve(self, step: _Closed) -> StepTime:
        totals: dict[str, float] = {}
        for name, start, end in step.phases:
            clock = _HOST_CLOCK if name in HOST_PHASES else self._clock
            totals[name] = totals.get(name, 0.0) + clock.seconds(start, end)
            clock.release(start, end)
        # Starting and reading a trace is no part of the step that it looks at.
        seconds = self._clock.seconds(step.before, step.after) - totals.pop("tracing", 0.0)
        self._clock.release(step.before, step.after)
        reporting = totals.pop("report", 0.0)
        if step.waits is None:
            return StepTime(seconds, StepParts(**totals))
        waits = step.waits
        away = waits.peers + totals.get("data", 0.0) + totals.get("snapshot", 0.0) + reporting
        # Some of the waiting for cores happened within collectives and would count twice; what was
        # calculated on a core is the rank's own in any case.
        own = max(waits.working, seconds - away - waits.cores)
        return StepTime(seconds, StepParts(**totals, peer_wait=waits.peers, own=own))


_Mark = float | torch.cuda.Event


class _Closed(NamedTuple):
    """A step whose marks have not been read."""

    before: _Mark
    after: _Mark
    phases: list[tuple[str, _Mark, _Mark]]
    waits: ThreadWaits | None


class _HostClock:
    """The host's own clock: on CPU nothing runs behind the host's back."""

    def mark(self) -> _Mark:
        return perf_counter()

    def seconds(self, start: _Mark, end: _Mark) -> float:
        assert isinstance(start, float) and isinstance(end, float)
        return end - start

    def release(self, *marks: _Mark) -> None:
        pass

    def wait(self, mark: _Mark) -> None:
        pass

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        yield


class _CudaClock:
    """Events recorded on the current stream, reused once read; phases are NVTX ranges."""

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []

    def mark(self) -> _Mark:
        event = self._free.pop() if self._free else _timing_event()
        event.record()
        return event

    def seconds(self, start: _Mark, end: _Mark) -> float:
        assert isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1000.0

    def release(self, *marks: _Mark) -> None:
        self._free.extend(mark for mark in marks if isinstance(mark, torch.cuda.Event))

    def wait(self, mark: _Mark) -> None:
        assert isinstance(mark, torch.cuda.Event)
        mark.synchronize()

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


_HOST_CLOCK = _HostClock()

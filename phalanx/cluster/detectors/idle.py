"""Whether the processes of a gang do anything: CPU time, output and GPUs, as agents measure."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from phalanx.cluster.detectors.robust import MILLION

BUSY_CPU_PPM = 10_000  # of one core; threads that only wait and wake up take less
BUSY_GPU_PPM = 10_000


class ActivityReport(Protocol):
    """What the processes of a node did so far; ``gpu_ppm``: of the busiest GPU, -1: not known."""

    @property
    def node(self) -> int: ...

    @property
    def cpu_ns(self) -> int: ...

    @property
    def output_bytes(self) -> int: ...

    @property
    def gpu_ppm(self) -> int: ...


class ActivityWindow(Struct, kw_only=True):
    """What was done since some moment, summed over nodes; ``gpu_ppm``: of the busiest GPU."""

    since_ns: int
    cpu_ns: int = 0
    output_bytes: int = 0
    gpu_ppm: int = -1
    heard: dict[int, tuple[int, ActivityReport]] = {}  # by node: when, and what it said last

    def restart(self, now_ns: int) -> None:
        """Sums begin anew."""
        self.since_ns, self.cpu_ns, self.output_bytes, self.gpu_ppm = now_ns, 0, 0, -1

    def add(self, fact: ActivityReport, now_ns: int) -> bool:
        """A node tells what was done so far; whether that shows activity since it last did."""
        before = self.heard.get(fact.node)
        self.heard[fact.node] = now_ns, fact
        if before is None:
            return True  # its processes have just started, or it has just come back
        then_ns, old = before
        cpu_ns = max(0, fact.cpu_ns - old.cpu_ns)
        written = abs(fact.output_bytes - old.output_bytes)  # a log that was cut shrinks
        self.cpu_ns += cpu_ns
        self.output_bytes += written
        self.gpu_ppm = max(self.gpu_ppm, fact.gpu_ppm)
        busy = cpu_ns * MILLION >= BUSY_CPU_PPM * max(1, now_ns - then_ns)
        return busy or written > 0 or fact.gpu_ppm >= BUSY_GPU_PPM

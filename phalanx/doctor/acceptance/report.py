"""What is asked of a burn-in, and what it tells."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from phalanx.doctor.finding import Finding

LoadKind = Literal["gemm", "memory", "collective", "disk"]
Outcome = Literal["accepted", "rejected", "incomplete"]
LOADS: tuple[LoadKind, ...] = ("gemm", "memory", "collective", "disk")
UNITS: dict[LoadKind, str] = {
    "gemm": "flop_per_second",
    "memory": "bytes_per_second",
    "collective": "bytes_per_second",
    "disk": "bytes_per_second",
}
LEAST_SECONDS, MOST_SECONDS = 1.0, 7 * 86_400.0
MOST_DCGM_LEVEL = 4


class AcceptanceRequest(Struct, frozen=True, kw_only=True):
    """Which node is loaded, how long and with what."""

    node: str
    folder: str  # on the disk that is to be written
    seconds: float = 1800.0
    loads: tuple[LoadKind, ...] = LOADS
    dcgm_level: int = 0  # of ``dcgmi diag``, before the loads; 0: it is not run


class LoadFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one load reached; rates in its unit."""

    load: LoadKind
    device: str  # "cpu", "cuda:0", "2 x gloo", "disk"
    unit: str
    samples: int = 0
    first: float = 0.0  # median of the first minute, or of the first third of a shorter burn-in
    last: float = 0.0  # the same, of the last
    worst: float = 0.0
    median: float = 0.0
    best: float = 0.0
    wrong: int = 0  # looks at which what came back was not right
    problem: str = ""  # why it ended before its time

    @property
    def key(self) -> str:
        """Its name among all of a node."""
        return f"{self.load} {self.device}"


class GpuSoak(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One GPU while it was loaded; -1: the driver does not say."""

    index: int
    samples: int
    first_celsius: float = -1.0
    most_celsius: float = -1.0
    most_sm_megahertz: float = -1.0
    least_sm_megahertz: float = -1.0
    throttle_reasons: int = 0  # all bits that were ever set
    uncorrected_errors: int = 0  # that came meanwhile
    corrected_errors: int = 0


class AcceptanceReport(Struct, frozen=True, kw_only=True):
    """All that a burn-in measured and found."""

    node: str
    began_ns: int
    seconds: float  # that all loads ran together
    wanted_seconds: float
    loads: list[LoadFigures]
    gpus: list[GpuSoak]
    findings: list[Finding]

    @property
    def interrupted(self) -> bool:
        """Whether it ended before its time."""
        return self.seconds < self.wanted_seconds

    @property
    def outcome(self) -> Outcome:
        """What came of it: a burn-in that was cut short accepts nothing."""
        if any(finding.verdict == "fail" for finding in self.findings):
            return "rejected"
        return "incomplete" if self.interrupted else "accepted"

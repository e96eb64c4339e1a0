"""A profile: what was found about a job's steps on a machine, small enough to keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from phalanx.train.profile.facts import DeviceRates, MemoryFacts, PowerReading

VERSION = 1
FILE = "profile.json"


class KernelTime(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of work in a step, set against the roof."""

    name: str
    kind: str
    shapes: str  # of its operands; "": not told
    number_format: str
    calls: float  # in a step
    seconds: float  # in a step
    flops: float  # in a step
    bytes: float  # in a step, that it must move at least

    @property
    def flops_per_second(self) -> float:
        return self.flops / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.seconds if self.seconds else 0.0

    @property
    def intensity(self) -> float:
        """FLOP a byte."""
        return self.flops / self.bytes if self.bytes else 0.0

    def roof(self, rates: DeviceRates) -> float | None:
        """Share of what the device could do at this intensity; None where that is unknown."""
        peak = rates.matmul_flops.get(self.number_format, 0.0)
        reached = []
        if peak and self.flops:
            reached.append(self.flops_per_second / peak)
        if rates.memory_bytes_per_second and self.bytes:
            reached.append(self.bytes_per_second / rates.memory_bytes_per_second)
        return max(reached) if reached and self.seconds else None


class AxisTime(msgspec.Struct, frozen=True, kw_only=True):
    """Communication of one axis in a step."""

    axis: str
    collective: str
    calls: float
    bytes: float  # of all calls
    seconds: float
    exposed_seconds: float  # that no compute hid

    @property
    def bytes_a_call(self) -> float:
        return self.bytes / self.calls if self.calls else 0.0


class HostSync(msgspec.Struct, frozen=True, kw_only=True):
    """A place where the host waits for the device."""

    where: str  # file, line and function; "": not found
    calls: float  # in a step


class MemorySample(msgspec.Struct, frozen=True, array_like=True):
    """Bytes in use at a moment of the traced steps."""

    seconds: float
    used: int
    reserved: int


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Undisturbed steps."""

    median_seconds: float
    spread_seconds: float  # between the quartiles
    steps: int
    data_seconds: float  # that the median step waited for data
    tokens: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.median_seconds if self.median_seconds else 0.0


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """When, where and from what code."""

    created: str
    host: str
    commit: str
    changed: bool  # beside the commit
    torch: str


class JobProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Where a step of a job goes."""

    version: int = VERSION
    name: str
    origin: Origin
    device: str
    device_name: str
    world_size: int
    job: dict[str, Any]  # every setting
    times: StepTimes
    synthetic: StepTimes | None  # the same steps without a corpus; None: they have none anyway
    traced_seconds: float  # of a traced step: tracing itself takes time
    kinds: dict[str, float]  # seconds of a traced step; they add up to it
    phases: dict[str, float]  # seconds of the host
    axes: list[AxisTime]
    kernels: list[KernelTime]
    matmul_formats: dict[str, float]  # seconds of products by number format
    recomputed_seconds: float
    gaps: int  # times that the device had nothing to do, in a step
    longest_gap_seconds: float
    syncs: list[HostSync]
    rates: DeviceRates
    peak_flops: float | None  # of the catalogue, in the format that computes; None: not in it
    mfu: float | None
    memory: MemoryFacts
    memory_line: list[MemorySample]
    power: PowerReading | None
    graphs: int
    recompiles: int

    def share(self, kind: str) -> float:
        """Of a traced step."""
        return self.kinds.get(kind, 0.0) / self.traced_seconds if self.traced_seconds else 0.0


def write_profile(profile: JobProfile, folder: Path) -> Path:
    """Keep a profile in a folder."""
    path = folder / FILE
    path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
    return path


def read_profile(path: Path) -> JobProfile:
    """A profile by its file or its folder; ValueError says what is wrong with it."""
    path = path / FILE if path.is_dir() else path
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=JobProfile)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}: no profile ({error})") from None
    if profile.version != VERSION:
        raise ValueError(
            f"{path}: a profile of version {profile.version}, and this release reads {VERSION}"
        )
    if min(profile.times.median_seconds, profile.traced_seconds) <= 0:
        raise ValueError(f"{path}: no profile (its steps took no time)")
    return profile

"""What rank 0 tells of its traced steps beside the trace, as a file of the run's folder."""

from __future__ import annotations

from pathlib import Path

import msgspec

from phalanx.train.report.run_folder import RunFolder

STEP_RANGE = "phalanx.step"  # the name of a traced step in the trace


class DeviceRates(msgspec.Struct, frozen=True):
    """What the device at hand reaches when every rank measures at the same time."""

    matmul_flops: dict[str, float]  # FLOP/s by the operands' format
    memory_bytes_per_second: float


class PowerReading(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU under the load of the traced steps, as its driver tells."""

    limit_watts: float
    default_limit_watts: float
    draw_watts: float
    clock_mhz: float
    highest_clock_mhz: float


class MemoryFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of rank 0 while it makes steps."""

    limit_bytes: int  # of the device; on CPU this rank's share of what the machine has
    state: dict[str, int]  # bytes by purpose that live through a step
    peak_bytes: int  # in use at once
    reserved_bytes: int  # that the allocator holds; on CPU the process' own
    retries: int = 0  # allocations that had to give everything unused back first
    allocator: str = ""  # PYTORCH_ALLOC_CONF, where somebody set it


class ProfileFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What no trace says."""

    device: str  # "cuda" or "cpu"
    device_name: str
    world_size: int
    traced: tuple[int, int]  # first and last step
    rates: DeviceRates
    memory: MemoryFacts
    power: PowerReading | None = None
    graphs: int = 0  # compiled, by the end
    recompiles: int = 0  # graphs that were compiled after the steps that warm up


class ProfileFiles:
    """Where a profiled run leaves what was recorded."""

    def __init__(self, folder: RunFolder) -> None:
        self.trace: Path = folder.logs / "profile-trace.json"
        self.stacks: Path = folder.logs / "profile-stacks.json"
        self.facts: Path = folder.logs / "profile-facts.json"

    def read_facts(self) -> ProfileFacts:
        """What the recorder wrote."""
        return msgspec.json.decode(self.facts.read_bytes(), type=ProfileFacts)

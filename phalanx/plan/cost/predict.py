"""The prediction for one mapping: time with its interval, memory stage by stage, and why."""

from __future__ import annotations

import math

from msgspec import Struct, structs

from phalanx.config import ConfigError
from phalanx.hardware import Cluster
from phalanx.plan.cost.constants import Constants, calibrated, shipped
from phalanx.plan.cost.step import slowed_by_allocator, step_time
from phalanx.plan.cost.uncertainty import Z80, spread
from phalanx.plan.grid import Grid, grid_of
from phalanx.plan.machine import machine_of
from phalanx.plan.memory.deciding_stages import rank_at
from phalanx.plan.memory.model_counts import flops_per_token
from phalanx.plan.memory.offload import ROOM_SHARE
from phalanx.plan.memory.peak import memory, rank_memory
from phalanx.plan.workload import Mapping, Software, Workload, usual_software


class StageMemory(Struct, frozen=True, kw_only=True):
    """Bytes on each rank of one pipeline position."""

    position: int
    layers: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: float
    working_bytes: float
    total_bytes: float
    library_bytes: float = 0.0  # of these, the driver's context, workspaces, NCCL's buffers


class Prediction(Struct, frozen=True, kw_only=True):
    """What a step of a mapping would take."""

    workload: Workload
    mapping: Mapping
    cluster: str
    gpus: int
    step_seconds: float
    step_seconds_low: float  # of the 80 % interval
    step_seconds_high: float
    tokens_per_second: float
    mfu: float  # model FLOPs (causal attention) over the peak of the mapping's precision
    parts: dict[str, float]  # seconds of the step; their sum is step_seconds
    bound_by: str  # the largest part
    memory: tuple[StageMemory, ...]
    memory_bytes: float  # of the fullest rank: gone from the device, where there is room
    allocated_bytes: float  # of these, what tensors take
    reserved_bytes: float  # and what the allocator holds for them
    needed_bytes: float  # on the smallest device that can hold it
    memory_limit: float
    host_bytes: float = 0.0  # that a rank keeps in host memory
    host_limit: float = 0.0
    nvme_bytes: float = 0.0  # and on local drives
    nvme_limit: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether the fullest rank has room on the device and for what is offloaded."""
        away = self.host_bytes <= self.host_limit and self.nvme_bytes <= self.nvme_limit
        return self.memory_bytes <= self.memory_limit and away

    def holding(self, fuller: Prediction) -> Prediction:
        """The same step, in the memory that another stretch of the run takes."""
        names = ("memory", "memory_bytes", "allocated_bytes", "reserved_bytes", "needed_bytes")
        away = ("host_bytes", "nvme_bytes")
        return structs.replace(self, **{name: getattr(fuller, name) for name in (*names, *away)})

    @property
    def memory_margin(self) -> float:
        """Room left on the fullest rank, as a share of the device; negative: does not fit."""
        return 1 - self.memory_bytes / self.memory_limit

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Tokens a second of one GPU."""
        return self.tokens_per_second / self.gpus


def predict(
    workload: Workload,
    mapping: Mapping,
    cluster: Cluster,
    *,
    constants: Constants | None = None,
    software: Software | None = None,
) -> Prediction:
    """Price one mapping on a cluster; the mapping must be valid for the model."""
    refuse(workload, mapping, cluster)
    machine = machine_of(cluster, mapping.gpus)
    constants = constants or shipped(machine.family)
    software = calibrated(software or usual_software(machine.family), constants)
    grid = grid_of([mapping])
    fullest = memory(workload, grid, software)
    time = step_time(workload, grid, machine, constants, software)
    time = slowed_by_allocator(time, fullest, machine, software)
    seconds = float(time.seconds[0])
    parts = {name: float(part[0]) for name, part in time.parts.items()}
    wide = spread(workload, machine, time, grid, constants, software)
    deviation = Z80 * float(wide[0])
    per_token = flops_per_token(workload.model, workload.sequence)
    flops = per_token.model_flops * workload.tokens
    stages = _stages(workload, grid, software)
    return Prediction(
        workload=workload,
        mapping=mapping,
        cluster=cluster.name,
        gpus=mapping.gpus,
        step_seconds=seconds,
        step_seconds_low=seconds * math.exp(-deviation),
        step_seconds_high=seconds * math.exp(deviation),
        tokens_per_second=workload.tokens / seconds,
        mfu=flops / (seconds * mapping.gpus * machine.peak(mapping.precision)),
        parts=parts,
        bound_by=max(parts, key=lambda name: parts[name]),
        memory=stages,
        memory_bytes=float(fullest.total[0]),
        allocated_bytes=float(fullest.allocated[0]),
        reserved_bytes=float(fullest.reserved[0]),
        needed_bytes=float(fullest.needed[0]),
        memory_limit=machine.memory_bytes,
        host_bytes=float(fullest.away.host[0]),
        host_limit=ROOM_SHARE * machine.host_memory_bytes,
        nvme_bytes=float(fullest.away.nvme[0]),
        nvme_limit=ROOM_SHARE * machine.nvme_bytes,
    )


def _stages(workload: Workload, grid: Grid, software: Software) -> tuple[StageMemory, ...]:
    stages = []
    for position in range(int(grid.pipeline[0])):
        rank = rank_at(workload, grid, software, position)
        here = rank_memory(workload, grid, software, rank)
        stages.append(
            StageMemory(
                position=position,
                layers=int(rank.dense[0] + rank.moe[0]),
                weight_bytes=int(here.weights[0]),
                gradient_bytes=int(here.gradients[0]),
                optimizer_bytes=int(here.optimizer[0]),
                activation_bytes=float(here.activations[0]),
                working_bytes=float(here.working[0]),
                library_bytes=float(here.libraries[0]),
                total_bytes=float(here.total[0]),
            )
        )
    return tuple(stages)


def refuse(workload: Workload, mapping: Mapping, cluster: Cluster) -> None:
    """Raise ConfigError where the mapping cannot run on the cluster at all."""
    if mapping.gpus > cluster.gpus:
        raise ConfigError(
            "gpus",
            mapping.gpus,
            f"tensor * pipeline * data * context exceeds the cluster's {cluster.gpus:,}",
            "a smaller data axis, or a larger cluster",
        )
    stages = mapping.pipeline * mapping.virtual_stages
    if stages > workload.model.layers:
        raise ConfigError(
            "pipeline",
            mapping.pipeline,
            f"pipeline * virtual_stages = {stages} stages exceed {workload.model.layers} layers",
            f"at most {workload.model.layers // mapping.virtual_stages}",
        )
    if mapping.data > workload.global_batch:
        raise ConfigError(
            "data",
            mapping.data,
            f"exceeds the {workload.global_batch} samples of a step",
            "more tensor, pipeline or context, or a larger batch",
        )

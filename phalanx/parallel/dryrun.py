"""What every rank of a job would hold, from the real parallel code without any memory.

The job's own mesh and modules are built for one rank of each pipeline position, over a
process group that pretends to have all ranks and with parameters on the meta device.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from phalanx.config import Job, micro_batches, stage_jobs
from phalanx.model import Transformer, declarations, is_orthogonalized
from phalanx.parallel.engine import build_parts
from phalanx.parallel.mesh import Mesh, build_mesh
from phalanx.parallel.pipeline import stages_of_rank
from phalanx.parallel.precision import compute_dtype
from phalanx.parallel.weight import local_part
from phalanx.plan.search.gpus_that_fit import MemoryFit, activation_bytes, fit_of
from phalanx.plan.workload import MOMENT_BYTES

_MODEL_AXES = ("tensor", "expert")  # these divide the model itself; the others are ZeRO's


class StageRow(msgspec.Struct, frozen=True):
    """One pipeline rank: what it computes and what each of its ranks holds."""

    pipeline_rank: int
    stages: list[int]
    layers: list[int]
    parameters: int  # of the whole position, over all its ranks
    parameters_per_rank: int  # that one rank computes with, before ZeRO
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int  # estimated
    total_bytes: int
    offloaded_bytes: int = 0  # of masters and moments, in host memory or on NVMe; not in the total


class DryRunReport(msgspec.Struct, frozen=True):
    """The job on its mesh."""

    name: str
    world_size: int
    mesh: dict[str, int]
    micro_batches: int
    parameters: int
    rows: list[StageRow]
    notes: list[str]
    seconds: float
    fit: MemoryFit | None = None  # None: on CPUs


def dry_run(job: Job, world_size: int) -> DryRunReport:
    """Build the job for one rank of every pipeline position and count."""
    began = time.perf_counter()
    kept = [activation_bytes(job, position) for position in range(job.parallel.pipeline)]
    fit = fit_of(job, world_size) if job.train.device != "cpu" else None
    train = msgspec.structs.replace(job.train, compile="off")
    precision = msgspec.structs.replace(job.precision, fp8=False)  # fp8 casts; it stores nothing
    job = msgspec.structs.replace(job, train=train, precision=precision)
    rows = []
    for position in range(job.parallel.pipeline):
        first_rank = position * (world_size // job.parallel.pipeline)
        with pretended_group(first_rank, world_size):
            mesh = build_mesh(job, torch.device("cpu"))
            rows.append(_row(job, mesh, position, build_parts(job, mesh), kept[position]))
    return DryRunReport(
        name=job.name,
        world_size=world_size,
        mesh=mesh.sizes | {"expert": job.parallel.expert},
        micro_batches=micro_batches(job),
        parameters=sum(row.parameters for row in rows),
        rows=rows,
        notes=[*_notes(job, rows), *([fit.text] if fit is not None and fit.text else [])],
        fit=fit,
        seconds=time.perf_counter() - began,
    )


@contextmanager
def pretended_group(rank: int, world_size: int) -> Iterator[None]:
    """A process group of any size in which collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _row(
    job: Job, mesh: Mesh, position: int, parts: list[Transformer], activations: int
) -> StageRow:
    count = _count(parts)
    weights = _weight_bytes(job, mesh, count)
    gradients = _gradient_bytes(job, mesh, count)
    muon = count.orthogonal_shards if job.optimizer.kind == "muon" else 0
    optimizer = int(MOMENT_BYTES[job.optimizer.state] * (count.trained_shards - muon)) + 4 * muon
    optimizer += 4 * count.trained_shards if job.train.ema is not None else 0
    offloaded = 0
    if job.memory.offload != "none":
        optimizer, offloaded = 0, optimizer + 4 * count.trained_shards
    return StageRow(
        pipeline_rank=position,
        stages=stages_of_rank(job.parallel, position),
        layers=[int(index) for part in parts for index in part.layers],
        parameters=count.whole,
        parameters_per_rank=count.held,
        weight_bytes=weights,
        gradient_bytes=gradients,
        optimizer_bytes=optimizer,
        activation_bytes=activations,
        total_bytes=weights + gradients + optimizer + activations,
        offloaded_bytes=offloaded,
    )


@dataclass
class _Elements:
    """Of a rank's parameters; one that is frozen has no gradient, and a copy no state."""

    whole: int = 0  # over all ranks of the position
    held: int = 0  # that compute, before ZeRO
    shards: int = 0  # of those, after it
    learning: int = 0  # that have a gradient
    learning_shards: int = 0
    trained: int = 0  # that have a master and moments
    trained_shards: int = 0
    orthogonal_shards: int = 0  # of those, matrices of which Muon keeps one moment


def _count(parts: list[Transformer]) -> _Elements:
    elements = _Elements()
    for part in parts:
        copies, said = part.embedding_copies(), dict(declarations(part))
        for name, parameter in part.named_parameters():
            local_elements = parameter.numel() // _model_shards(parameter)
            shards, learns = local_part(parameter).numel(), parameter.requires_grad
            elements.held += local_elements
            elements.shards += shards
            elements.learning += local_elements * learns
            elements.learning_shards += shards * learns
            if name not in copies:  # the first stage counts it, and has its state
                elements.whole += parameter.numel()
                elements.trained += local_elements * learns
                elements.trained_shards += shards * learns
                muons = is_orthogonalized(name, parameter.ndim, said[name])
                elements.orthogonal_shards += shards * learns * muons
    return elements


def _model_shards(parameter: torch.Tensor) -> int:
    """Into how many pieces tensor and expert parallelism divide a parameter."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh, pieces = parameter.device_mesh, 1
    for name, size, placement in zip(
        mesh.mesh_dim_names or (), mesh.shape, parameter.placements, strict=True
    ):
        if name in _MODEL_AXES and not placement.is_replicate():
            pieces *= size
    return pieces


def _weight_bytes(job: Job, mesh: Mesh, count: _Elements) -> int:
    """fp32 masters where they are sharded, and the weights that compute where they are kept."""
    width = compute_dtype(job.precision).itemsize
    if job.memory.offload == "parameters":
        return 0
    if job.memory.offload == "optimizer":  # masters leave with the moments
        whole_shards = mesh.uses_fsdp and job.parallel.zero == 3
        return 4 * count.shards if whole_shards else width * count.held
    if not mesh.uses_fsdp:
        return width * count.held + (4 if width < 4 else 0) * count.trained
    return 4 * count.shards + (width * count.held if job.parallel.zero < 3 else 0)


def _gradient_bytes(job: Job, mesh: Mesh, count: _Elements) -> int:
    """Gradients between the first micro-batch and the optimizer."""
    width = 4 if job.parallel.reduce_dtype == "float32" else compute_dtype(job.precision).itemsize
    if (
        not mesh.uses_fsdp
        and max(micro_batches(each.job) for each in stage_jobs(job)) == 1
        and not mesh.uses_ddp
    ):
        width = compute_dtype(job.precision).itemsize
    kept_whole = job.parallel.zero < 2 or job.parallel.pipeline > 1
    if job.memory.offload == "parameters" and not kept_whole:
        return 0  # FSDP adds them up in host memory
    whole = kept_whole or not mesh.uses_fsdp
    return width * (count.learning if whole else count.learning_shards)


def _notes(job: Job, rows: list[StageRow]) -> list[str]:
    notes = ["activations are estimated; the other columns are counted"]
    if job.train.sequence_stages:
        notes.append("activations are those of the stage of train.sequence_stages that has most")
    if job.adapter.kind != "none":
        notes.append(
            "the model's own weights are frozen: adapters alone have gradients and moments"
        )
    if job.parallel.pipeline > 1 and job.parallel.zero >= 2:
        notes.append(
            "pipeline schedules reduce gradients once a step, so whole gradients are held "
            "although parallel.zero >= 2"
        )
    if folder := job.memory.offload_folder:
        most = max(row.offloaded_bytes for row in rows) / 1e9
        notes.append(
            f"masters and moments are in files below {folder}, at most {most:.1f} GB a rank"
        )
    if job.memory.offload_activations or (job.memory.offload != "none" and not folder):
        notes.append("what is offloaded is in host memory and not counted")
    if job.parallel.zero == 3:
        notes.append("gathered weights of the running layer and those prefetched come on top")
    return notes

"""What a job needs of an engine: nodes, GPUs, cores, memory and time, from the job and its plan."""

from __future__ import annotations

import math

from msgspec import Struct

from phalanx.config import Job, stage_tokens
from phalanx.control.server.http.submission import RequestedWork, slot_of
from phalanx.plan import AxisTraffic, Prediction, predict, stage_workloads, traffic

USUAL_NODE_GPUS = 8
MARGIN = 0.15  # on the predicted time
LEAST_SHARE = 0.25  # of it that is worth starting with, since the job goes on by itself
LEAST_HOURS = 0.5
SNAPSHOTS = 6  # of a rank's state in host memory: four of its own, two of its neighbour's
BASE_BYTES = 8 << 30  # of a worker: torch, CUDA, buffers


class Need(Struct, frozen=True, kw_only=True):
    """One gang, as an engine is asked for it."""

    ranks: int
    slots: int  # nodes of the gang
    spares: int
    gpus_per_node: int
    wants_gpus: bool  # False: the job computes on CPUs
    memory_bytes: int = 0  # of a node; 0: not predicted, all of it
    hours: float = 0.0  # 0: not known
    least_hours: float = 0.0
    predicted: str = ""  # what the time is made of
    traffic: tuple[AxisTraffic, ...] = ()

    @property
    def nodes(self) -> int:
        """Nodes of the gang and spares."""
        return self.slots + self.spares


def need_of(wanted: RequestedWork) -> Need:
    """What a resolved job, or a program, asks an engine for."""
    job, backend, ranks = wanted.job, wanted.backend, wanted.ranks
    slot = slot_of(ranks, wanted.slot_gpus or backend.gpus_per_node or USUAL_NODE_GPUS)
    device = backend.device if job is None else job.train.device
    need = Need(
        ranks=ranks,
        slots=-(-ranks // slot),
        spares=wanted.spares or backend.spares,
        gpus_per_node=slot,
        wants_gpus=device != "cpu",
        hours=backend.hours,
        least_hours=backend.hours,
    )
    if job is None or not backend.cluster:
        return need
    return _predicted(job, need)


def _predicted(job: Job, need: Need) -> Need:
    from msgspec import structs

    from phalanx.hardware import cluster

    where = cluster(job.backend.cluster)
    stages = [predict(*each, where) for each in stage_workloads(job)]
    fullest = max(stages, key=lambda each: each.memory_bytes)
    seconds = stages[0].step_seconds * job.train.steps
    if len(stages) > 1:  # steps of later ones are other steps
        read = zip(stage_tokens(job), stages, strict=True)
        seconds = sum(tokens / stage.tokens_per_second for tokens, stage in read)
    hours = seconds * (1 + MARGIN) / 3600
    expected = (
        f"{job.train.steps:,} steps of {seconds / job.train.steps:.3g} s as predicted for "
        f"{where.name}, and {100 * MARGIN:.0f} % more"
    )
    return structs.replace(
        need,
        memory_bytes=_memory(fullest, need),
        hours=need.hours or hours,
        least_hours=need.hours or max(LEAST_HOURS, hours * LEAST_SHARE),
        predicted="" if need.hours else expected,
        traffic=traffic(stages[0].workload, stages[0].mapping, where),
    )


def _memory(found: Prediction, need: Need) -> int:
    state = max(stage.weight_bytes + stage.optimizer_bytes for stage in found.memory)
    rank = found.host_bytes + SNAPSHOTS * state + BASE_BYTES
    return math.ceil(rank * need.gpus_per_node)

"""The plan as other rooms read it: small, versioned, and the same in JSON and MessagePack."""

from __future__ import annotations

from msgspec import Struct, structs

from phalanx.config import Job, run_tokens, stage_tokens
from phalanx.hardware import Cluster
from phalanx.plan.cost.constants import Constants
from phalanx.plan.cost.failures import FailureOutlook, FailureSettings, outlook
from phalanx.plan.cost.money import Bill, Range, bill
from phalanx.plan.cost.predict import Prediction, StageMemory, predict
from phalanx.plan.cost.restart import RestartTimes, restart_times
from phalanx.plan.cost.traffic import AxisTraffic, traffic
from phalanx.plan.memory.model_counts import parameters
from phalanx.plan.memory.offload import MASTER_BYTES
from phalanx.plan.question.emit import stage_workloads
from phalanx.plan.search.proposal import PlanProposal
from phalanx.plan.workload import Mapping, Workload

VERSION = 2


class Plan(Struct, frozen=True, kw_only=True):
    """A mapping with what it needs of a cluster and what it promises.

    Ranks are laid out pipeline, data, context, tensor, tensor innermost: rank =
    ((pipeline * data + d) * context + c) * tensor + t. Every GPU sends ``traffic`` in a step.
    """

    version: int = VERSION
    model: str
    parameters: int
    cluster: str
    gpu: str
    gpus: int
    workload: Workload
    mapping: Mapping
    traffic: tuple[AxisTraffic, ...]  # bytes a step by axis, nearest ranks first
    step_seconds: Range  # with its 80 % interval, as the ranges below
    tokens_per_second: Range
    parts: dict[str, float]  # seconds of a step by what they go to
    memory: tuple[StageMemory, ...]  # bytes of a rank by pipeline position
    memory_bytes: float  # of the fullest rank
    memory_limit: float  # of the device
    host_bytes: float  # that a rank keeps in host memory
    nvme_bytes: float  # and on local drives
    mtbf_seconds: float  # between interruptions of the job
    detection_seconds: float
    recovery_seconds: float
    restart: RestartTimes  # its parts
    checkpoint_bytes: float
    checkpoint_seconds: float  # between checkpoints
    stall_seconds: float  # that a checkpoint stops training
    flush_seconds: float  # until it is on remote storage
    goodput: Range
    spare_nodes: int  # so that with 99 % probability no failed node is missing
    days: Range
    dollars: Range
    megawatt_hours: Range


def plan_of(proposal: PlanProposal) -> Plan:
    """What other rooms need of a proposal."""
    return _plan(
        proposal.model, proposal.cluster, proposal.prediction, proposal.failures, proposal.bill
    )


def plan_job(
    job: Job,
    on: Cluster,
    *,
    constants: Constants | None = None,
    settings: FailureSettings | None = None,
    spare_gpus: int = 0,
) -> Plan:
    """What a resolved job promises on a cluster that it fills; ConfigError where it cannot run."""
    stages = [predict(*each, on, constants=constants) for each in stage_workloads(job)]
    workload = stages[0].workload
    moments = workload.moment_bytes if workload.trains == "all" else 0.0
    stored = (MASTER_BYTES + moments) * parameters(workload.model).total
    ahead = outlook(on, stored, settings)
    kept = Range(ahead.goodput_low, ahead.goodput, ahead.goodput_high)
    speed = _mean_speed(stage_tokens(job), [_speed(each) for each in stages])
    cost = bill(on, run_tokens(job), speed, kept, spare_gpus)
    fullest = max(stages, key=lambda each: each.memory_bytes)
    return _plan(job.name, on, stages[0].holding(fullest), ahead, cost)


def _mean_speed(tokens: list[int], speeds: list[Range]) -> Range:
    """Of a run that reads so many tokens at each of them."""
    if len(speeds) == 1:
        return speeds[0]
    total = sum(tokens)
    means = [
        total / sum(n / speed for n, speed in zip(tokens, each, strict=True))
        for each in zip(*(structs.astuple(speed) for speed in speeds), strict=True)
    ]
    return Range(*means)


def _speed(step: Prediction) -> Range:
    tokens = step.workload.tokens
    return Range(
        tokens / step.step_seconds_high, step.tokens_per_second, tokens / step.step_seconds_low
    )


def _plan(name: str, on: Cluster, step: Prediction, ahead: FailureOutlook, cost: Bill) -> Plan:
    return Plan(
        model=name,
        parameters=parameters(step.workload.model).total,
        cluster=on.name,
        gpu=on.gpu.key,
        gpus=step.gpus,
        workload=step.workload,
        mapping=step.mapping,
        traffic=traffic(step.workload, step.mapping, on),
        step_seconds=Range(step.step_seconds_low, step.step_seconds, step.step_seconds_high),
        tokens_per_second=_speed(step),
        parts=step.parts,
        memory=step.memory,
        memory_bytes=step.memory_bytes,
        memory_limit=step.memory_limit,
        host_bytes=step.host_bytes,
        nvme_bytes=step.nvme_bytes,
        mtbf_seconds=ahead.mtbf_seconds,
        detection_seconds=ahead.detection_seconds,
        recovery_seconds=ahead.recovery_seconds,
        restart=restart_times(on, ahead.checkpoint_bytes, ahead.storage_bandwidth_per_node),
        checkpoint_bytes=ahead.checkpoint_bytes,
        checkpoint_seconds=ahead.interval_seconds,
        stall_seconds=ahead.stall_seconds,
        flush_seconds=ahead.flush_seconds,
        goodput=Range(ahead.goodput_low, ahead.goodput, ahead.goodput_high),
        spare_nodes=ahead.spares[0].spares,
        days=cost.days,
        dollars=cost.dollars,
        megawatt_hours=cost.megawatt_hours,
    )

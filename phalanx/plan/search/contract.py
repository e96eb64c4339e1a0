"""The plan as other rooms read it: small, versioned, and the same in JSON and MessagePack."""

from __future__ import annotations

from msgspec import Struct

from phalanx.plan.cost.money import Range
from phalanx.plan.cost.predict import StageMemory
from phalanx.plan.cost.traffic import AxisTraffic
from phalanx.plan.search.proposal import PlanProposal
from phalanx.plan.workload import Mapping, Workload

VERSION = 1


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
    checkpoint_bytes: float
    checkpoint_seconds: float  # between checkpoints
    goodput: Range
    spare_nodes: int  # so that with 99 % probability no failed node is missing
    days: Range


def plan_of(proposal: PlanProposal) -> Plan:
    """What other rooms need of a proposal."""
    prediction, ahead = proposal.prediction, proposal.failures
    low, high = prediction.step_seconds_low, prediction.step_seconds_high
    return Plan(
        model=proposal.model,
        parameters=proposal.parameters,
        cluster=proposal.cluster.name,
        gpu=proposal.cluster.gpu.key,
        gpus=proposal.gpus,
        workload=prediction.workload,
        mapping=prediction.mapping,
        traffic=proposal.traffic,
        step_seconds=Range(low, prediction.step_seconds, high),
        tokens_per_second=proposal.tokens_per_second,
        parts=prediction.parts,
        memory=prediction.memory,
        memory_bytes=prediction.memory_bytes,
        memory_limit=prediction.memory_limit,
        host_bytes=prediction.host_bytes,
        nvme_bytes=prediction.nvme_bytes,
        mtbf_seconds=ahead.mtbf_seconds,
        detection_seconds=ahead.detection_seconds,
        recovery_seconds=ahead.recovery_seconds,
        checkpoint_bytes=ahead.checkpoint_bytes,
        checkpoint_seconds=ahead.interval_seconds,
        goodput=Range(ahead.goodput_low, ahead.goodput, ahead.goodput_high),
        spare_nodes=ahead.spares[0].spares,
        days=proposal.bill.days,
    )

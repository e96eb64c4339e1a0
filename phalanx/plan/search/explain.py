"""Why a plan is as fast as it is, and which changes would make it faster."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct, structs

from phalanx.config import ConfigError
from phalanx.hardware import Cluster
from phalanx.plan.cost.constants import Constants
from phalanx.plan.cost.predict import Prediction, predict
from phalanx.plan.machine import machine_of
from phalanx.plan.question.emit import job_of
from phalanx.plan.search.behind import EvidenceBehind, evidence_behind
from phalanx.plan.workload import OFFLOADS, Mapping, Recompute, Software, Workload

WORDS = {
    "matmul": "matrix products",
    "attention": "attention",
    "elementwise": "memory-bound passes",
    "recompute": "recompute",
    "tensor": "exposed tensor-parallel traffic",
    "context": "exposed context-parallel traffic",
    "expert": "exposed expert traffic and waiting for the busiest expert",
    "pipeline": "exposed sends between stages",
    "data": "exposed gradients and gathered weights",
    "offload": "traffic to host memory or NVMe, and the update there",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer step",
    "host": "host work, and what no term counts",
    "allocator": "the allocator, which gives memory back and asks for it again",
    "straggler": "waiting for the slowest rank",
}
WORK = ("matmul", "attention", "elementwise")


class PlanChange(Struct, frozen=True):
    """Something that could be different, and what it would give."""

    kind: str  # "mapping", "job", "software" or "hardware"
    what: str
    gain: float  # tokens/s, as a share of what they are
    tokens_per_second: float
    memory_bytes: float
    fits: bool


class LessRecompute(Struct, frozen=True):
    """The same mapping with less recomputed, which is faster and does not fit."""

    recompute: str
    memory_bytes: float


class Explanation(Struct, frozen=True, kw_only=True):
    """What a step consists of and what bounds it."""

    waterfall: dict[str, float]  # seconds, largest kind of work first, then the losses
    bound_by: str
    loss: str  # the largest part that is no work
    loss_share: float
    changes: tuple[PlanChange, ...]  # that help, best first
    evidence: tuple[EvidenceBehind, ...]  # measured runs that stand behind the prediction
    less_recompute: LessRecompute | None = None


def explain_plan(
    prediction: Prediction,
    cluster: Cluster,
    constants: Constants,
    software: Software | None = None,
    most: int = 3,
) -> Explanation:
    """The waterfall of a prediction and the few changes that would help most."""
    parts, software = prediction.parts, software or Software()
    machine = machine_of(cluster, prediction.gpus)
    losses = {name: seconds for name, seconds in parts.items() if name not in WORK}
    worst = max(losses, key=lambda name: losses[name])
    ordered = {name: parts[name] for name in WORDS if name in parts}
    ordered |= {name: seconds for name, seconds in parts.items() if name not in ordered}
    return Explanation(
        waterfall=ordered,
        bound_by=WORDS.get(prediction.bound_by, prediction.bound_by),
        loss=WORDS.get(worst, worst),
        loss_share=losses[worst] / prediction.step_seconds,
        changes=tuple(best_changes(prediction, cluster, constants, software)[:most]),
        evidence=evidence_behind(prediction, machine, constants, software),
        less_recompute=_less_recompute(prediction, cluster, constants, software),
    )


def _less_recompute(
    prediction: Prediction, cluster: Cluster, constants: Constants, software: Software
) -> LessRecompute | None:
    """What less recompute would hold, where that is why there is any."""
    workload, mapping = prediction.workload, prediction.mapping
    if mapping.recompute == "none":
        return None
    # What zero-bubble splits cannot recompute a selection.
    least = mapping.recompute == "full" and mapping.schedule != "zero-bubble"
    level: Recompute = "selective" if least else "none"
    other = structs.replace(mapping, recompute=level)
    without = predict(workload, other, cluster, constants=constants, software=software)
    return None if without.fits else LessRecompute(level, without.memory_bytes)


def best_changes(
    prediction: Prediction, cluster: Cluster, constants: Constants, software: Software
) -> list[PlanChange]:
    """Every single change that can run, fits and makes tokens faster; best first."""
    changes = []
    for change_kind, what, workload, mapping, on, does in _candidates(
        prediction, cluster, software
    ):
        try:
            if change_kind == "mapping":
                job_of("plan", workload, mapping, workload.tokens, 0)
            other = predict(workload, mapping, on, constants=constants, software=does)
        except ConfigError:
            continue
        gain = other.tokens_per_second / prediction.tokens_per_second - 1
        # What hardly a run has shown must win at the 90th percentile too.
        sure = change_kind != "mapping" or other.step_seconds_high < prediction.step_seconds_high
        if other.fits and gain > 0.002 and sure:
            changes.append(
                PlanChange(
                    change_kind, what, gain, other.tokens_per_second, other.memory_bytes, other.fits
                )
            )
    return sorted(changes, key=lambda change: -change.gain)


Candidate = tuple[str, str, Workload, Mapping, Cluster, Software]


def _candidates(
    prediction: Prediction, cluster: Cluster, software: Software
) -> Iterator[Candidate]:
    workload, mapping = prediction.workload, prediction.mapping
    for what, other in _mappings(mapping):
        if other.schedule != "zero-bubble" or workload.model.mtp is None:  # it splits no such model
            yield "mapping", what, workload, other, cluster, software
    for what, bigger in _workloads(workload):
        yield "job", what, bigger, mapping, cluster, software
    if "fp8" in cluster.gpu.peak_flops and mapping.precision in ("bfloat16", "float16"):
        narrow = structs.replace(mapping, precision="fp8")
        yield "job", "matrix products in fp8", workload, narrow, cluster, software
    if mapping.tensor > 1 and not software.overlap_tensor:
        does = structs.replace(software, overlap_tensor=True)
        yield (
            "software",
            "gathers of tensor parallelism beside matmuls",
            *(
                workload,
                mapping,
                cluster,
                does,
            ),
        )
    if mapping.zero == 0 and cluster.fabric.in_network_reduction and mapping.data > 1:
        does = structs.replace(software, in_network_reduction=True)
        yield "software", "gradients summed by the switches", workload, mapping, cluster, does
    if mapping.expert > 1 and not software.overlap_expert:
        does = structs.replace(software, overlap_expert=True)
        yield "software", "expert all-to-all beside compute", workload, mapping, cluster, does
    for what, on in _clusters(cluster):
        yield "hardware", what, workload, mapping, on, software


def _mappings(mapping: Mapping) -> Iterator[tuple[str, Mapping]]:
    """Neighbours of a mapping: one axis against another, or one level up or down."""
    axes = ("tensor", "pipeline", "context", "data")
    for fewer in axes:
        for more in axes:
            size = getattr(mapping, fewer)
            if fewer != more and size % 2 == 0:
                grown = getattr(mapping, more) * 2
                other = structs.replace(mapping, **{fewer: size // 2, more: grown})
                yield f"{fewer} {size // 2}, {more} {grown}", other
    for micro in (mapping.micro_batch * 2, mapping.micro_batch // 2):
        if micro:
            yield f"micro-batch {micro}", structs.replace(mapping, micro_batch=micro)
    for level in ("none", "selective"):
        if mapping.recompute != level and mapping.recompute != "none":
            yield f"recompute {level}", structs.replace(mapping, recompute=level)
    if mapping.pipeline > 1:
        for stages in (2, 4, 8):
            if stages != mapping.virtual_stages:
                changed = structs.replace(mapping, schedule="interleaved", virtual_stages=stages)
                yield f"{stages} interleaved stages a rank", changed
        if mapping.schedule != "zero-bubble":
            changed = structs.replace(mapping, schedule="zero-bubble", virtual_stages=2)
            yield "zero-bubble schedule", changed
    for zero in range(4):
        if zero != mapping.zero:
            yield f"ZeRO {zero}", structs.replace(mapping, zero=zero)
    for offload in OFFLOADS:
        if mapping.offload not in ("none", offload):
            words = "no offload" if offload == "none" else f"offload {offload}"
            yield words, structs.replace(mapping, offload=offload)


def _workloads(workload: Workload) -> Iterator[tuple[str, Workload]]:
    batch = workload.global_batch * 2
    yield "twice the batch", structs.replace(workload, global_batch=batch)
    if workload.model.moe is not None and workload.routing_skew > 0:
        yield "perfectly balanced experts", structs.replace(workload, routing_skew=0.0)


def _clusters(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    nics = structs.replace(cluster, nics_per_gpu=2 * cluster.nics_per_gpu)
    yield "twice the network", nics
    link = structs.replace(cluster.link, links=2 * cluster.link.links)
    yield "twice the NVLink", structs.replace(cluster, link=link)
    gpu = structs.replace(cluster.gpu, memory_bandwidth=2 * cluster.gpu.memory_bandwidth)
    yield "twice the memory bandwidth", structs.replace(cluster, gpu=gpu)

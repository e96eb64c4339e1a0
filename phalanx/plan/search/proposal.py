"""From a question to a plan: the mapping, its speed, what failures leave of it, and the bill."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct, structs

from phalanx.config import ConfigError
from phalanx.hardware import Cluster
from phalanx.plan.cost.constants import Constants
from phalanx.plan.cost.failures import FailureOutlook, outlook
from phalanx.plan.cost.money import Bill, Range, bill
from phalanx.plan.cost.predict import Prediction
from phalanx.plan.cost.traffic import AxisTraffic, traffic
from phalanx.plan.machine import machine_of
from phalanx.plan.memory.model_counts import parameters
from phalanx.plan.memory.offload import MASTER_BYTES
from phalanx.plan.question.emit import job_of, job_toml
from phalanx.plan.question.quantities import duration, short
from phalanx.plan.question.request import PlanQuestion
from phalanx.plan.search.gpu_counts import other_counts, round_counts, rounder_counts
from phalanx.plan.search.search import MappingCandidate, SearchResult, search
from phalanx.plan.search.space import Pins
from phalanx.plan.show.plot import Picture, Point
from phalanx.plan.show.roofline import kernels
from phalanx.plan.workload import Mapping, Precision, Software


class IdleGpus(Struct, frozen=True, kw_only=True):
    """GPUs of the cluster that are better left out of the mesh, and why."""

    gpus: int
    step_seconds: float | None  # of the best mapping onto all GPUs; None where there is none
    mapping: Mapping | None


class PlanProposal(Struct, frozen=True, kw_only=True):
    """The answer: what to run, how fast, how long, at what cost."""

    model: str
    parameters: int
    active_parameters: int
    cluster: Cluster
    gpus: int  # of the cluster that are used
    tokens: int
    objective: str
    prediction: Prediction
    tokens_per_second: Range
    traffic: tuple[AxisTraffic, ...]
    failures: FailureOutlook
    checkpoint_steps: int
    bill: Bill
    alternatives: tuple[MappingCandidate, ...]
    pareto: tuple[MappingCandidate, ...]
    considered: int
    priced: int
    search_seconds: float
    constants: Constants
    software: Software
    assumed: tuple[str, ...]
    idle: IdleGpus | None = None


def propose(question: PlanQuestion) -> PlanProposal:
    """The best plan for a question; where there is none, ConfigError says the nearest that is."""
    whole = question.cluster
    if question.objective == "memory":
        return _propose(question, whole)
    counts = dict.fromkeys((whole.gpus, *rounder_counts(whole)))
    if question.objective != "tokens":
        counts |= dict.fromkeys(round_counts(whole))
    candidates = list(_proposals(question, counts))
    if not candidates:
        return _propose(question, whole)
    if question.objective == "days":
        return min(candidates, key=lambda proposal: proposal.bill.days.mid)
    if question.objective == "dollars":
        return min(candidates, key=lambda proposal: proposal.bill.dollars.mid)
    return _fastest(candidates, whole.gpus, question.robust)


def _proposals(question: PlanQuestion, counts: Iterable[int]) -> Iterator[PlanProposal]:
    """The best plan on so many of the GPUs each, where there is one."""
    for gpus in counts:
        try:
            yield _propose(question, structs.replace(question.cluster, gpus=gpus), hint=False)
        except ConfigError:
            continue


def _fastest(candidates: list[PlanProposal], gpus: int, robust: bool) -> PlanProposal:
    """The plan on all GPUs, unless a step on fewer is no longer: the others would bring nothing."""

    def seconds(proposal: PlanProposal) -> float:
        first = proposal.alternatives[0]
        return first.step_seconds_p90 if robust else first.step_seconds

    best, on_all = min(candidates, key=seconds), candidates[0]
    if on_all.gpus < gpus:
        return structs.replace(
            best, idle=IdleGpus(gpus=gpus - best.gpus, step_seconds=None, mapping=None)
        )
    if best is on_all:
        return on_all
    beside = on_all.prediction
    idle = IdleGpus(gpus=gpus - best.gpus, step_seconds=beside.step_seconds, mapping=beside.mapping)
    return structs.replace(best, idle=idle)


def _propose(question: PlanQuestion, on: Cluster, hint: bool = True) -> PlanProposal:
    try:
        result = _search(question, on)
    except ConfigError as error:
        if hint:
            raise _with_nearest(error, question) from None
        raise
    best = result.best
    total = parameters(question.workload.model)
    speed = Range(
        question.workload.tokens / best.step_seconds_high,
        best.tokens_per_second,
        question.workload.tokens / best.step_seconds_low,
    )
    stored = (MASTER_BYTES + question.workload.moment_bytes) * total.total
    ahead = outlook(on, stored, question.failures)
    kept = Range(ahead.goodput_low, ahead.goodput, ahead.goodput_high)
    return PlanProposal(
        model=question.name,
        parameters=total.total,
        active_parameters=total.active,
        cluster=on,
        gpus=on.gpus,
        tokens=question.tokens,
        objective=question.objective,
        prediction=best,
        tokens_per_second=speed,
        traffic=traffic(question.workload, best.mapping, on, question.software),
        failures=ahead,
        checkpoint_steps=max(1, round(ahead.interval_seconds / best.step_seconds)),
        bill=bill(on, question.tokens, speed, kept, spare_gpus=ahead.spares[0].gpus),
        alternatives=result.top,
        pareto=result.pareto,
        considered=result.considered,
        priced=result.priced,
        search_seconds=result.seconds,
        constants=question.constants,
        software=question.software,
        assumed=question.assumed,
    )


def _search(question: PlanQuestion, on: Cluster) -> SearchResult:
    pins = dict(question.pins)
    precision: Precision = pins.pop("precision", "bfloat16")
    return search(
        question.workload,
        on,
        pins=Pins(**pins),
        objective=question.objective,
        robust=question.robust,
        precision=precision,
        constants=question.constants,
        software=question.software,
    )


def _with_nearest(error: ConfigError, question: PlanQuestion) -> ConfigError:
    """The same error, with the nearest number of GPUs at which some mapping works."""
    for gpus in other_counts(question.cluster):
        try:
            nearest = _search(question, structs.replace(question.cluster, gpus=gpus))
        except ConfigError:
            continue
        first = error.problems[0]
        which = "least that would" if gpus > question.cluster.gpus else "nearest that would"
        fix = f"the {which}: {gpus:,} GPUs ({describe(nearest.best.mapping)})"
        return ConfigError(first.key, first.value, first.rule, fix)
    return _with_pin(error, question)


def _with_pin(error: ConfigError, question: PlanQuestion) -> ConfigError:
    """The same error, with a pin without which some mapping works."""
    for name, value in reversed(question.pins.items()):  # words before numbers of GPUs
        rest = {other: kept for other, kept in question.pins.items() if other != name}
        try:
            unpinned = _search(structs.replace(question, pins=rest), question.cluster)
        except ConfigError:
            continue
        first = error.problems[0]
        fix = f"without {name} {value} this would: {describe(unpinned.best.mapping)}"
        return ConfigError(first.key, first.value, first.rule, fix)
    return error


def describe(mapping: Mapping) -> str:
    """A mapping in one line: ``tensor 8 x pipeline 16 x data 128, ZeRO 1, …``."""
    axes = [
        f"{axis} {getattr(mapping, axis)}"
        for axis in ("tensor", "pipeline", "data", "context")
        if getattr(mapping, axis) > 1
    ]
    rest = [" x ".join(axes) or "one GPU"]
    if mapping.expert > 1:
        rest.append(f"experts over {mapping.expert}")
    rest.append(f"ZeRO {mapping.zero}")
    rest.append(f"micro-batch {mapping.micro_batch}")
    if mapping.pipeline > 1:
        stages = f" of {mapping.virtual_stages} stages a rank" if mapping.virtual_stages > 1 else ""
        rest.append(mapping.schedule + stages)
    if mapping.recompute != "none":
        rest.append(f"{mapping.recompute} recompute")
    if mapping.offload != "none":
        rest += [_where(part) for part in mapping.offload.split("+")]
    return ", ".join([*rest, mapping.precision])


def _where(part: str) -> str:
    what = part.removesuffix("-nvme")
    return f"{what} {'on NVMe' if what != part else 'in host memory'}"


def idle_sentence(proposal: PlanProposal) -> str:
    """How many GPUs the plan leaves out of its mesh, and why; "" where it uses all."""
    idle = proposal.idle
    if idle is None:
        return ""
    text = f"{idle.gpus:,} of {proposal.gpus + idle.gpus:,} GPUs, which serve as spares: "
    if idle.mapping is None or idle.step_seconds is None:
        return text + "no mapping works on all of them"
    return (
        text + f"on all of them a step takes {idle.step_seconds:.3g} s ({describe(idle.mapping)})"
    )


def not_run(proposal: PlanProposal) -> str:
    """Why ``phalanx train`` would refuse the plan; "" where it runs it."""
    prediction = proposal.prediction
    try:
        job_of("plan", prediction.workload, prediction.mapping, proposal.tokens, 0)
    except ConfigError as error:
        first = error.problems[0]
        return f"{first.rule}; {first.fix}"
    return ""


def emitted(proposal: PlanProposal, command: str) -> str:
    """The plan as a job file for ``phalanx train``."""
    prediction = proposal.prediction
    job = job_of(
        proposal.model,
        prediction.workload,
        prediction.mapping,
        proposal.tokens,
        proposal.checkpoint_steps,
    )
    comments = (
        f"made by: {command}",
        f"predicted on {proposal.cluster.name}: step {duration(prediction.step_seconds)}, "
        f"{short(prediction.tokens_per_second)} tok/s, MFU {prediction.mfu:.1%}, "
        f"{prediction.memory_bytes / 2**30:.1f} GiB a GPU",
        "name the corpus: set data.source and data.path",
    )
    return job_toml(job, comments)


def picture(proposal: PlanProposal) -> Picture:
    """What ``--plot`` draws of a plan."""
    prediction, on = proposal.prediction, proposal.cluster
    tokens = prediction.workload.tokens / proposal.gpus
    points = {
        (c.memory_bytes / 2**30, tokens / c.step_seconds): describe(c.mapping)
        for c in proposal.pareto
    }
    chosen = (prediction.memory_bytes / 2**30, prediction.tokens_per_second_per_gpu)
    points.pop(chosen, None)
    return Picture(
        title=f"{proposal.model} on {on.name}: {proposal.gpus:,} x {on.gpu.name}, "
        f"{short(prediction.tokens_per_second)} tok/s, MFU {prediction.mfu:.1%}",
        subtitle=describe(prediction.mapping),
        parts=prediction.parts,
        front=(
            *(Point(label, x, y) for (x, y), label in points.items()),
            Point("chosen", *chosen, chosen=True),
        ),
        front_axes=("GiB of a GPU", "tokens/s of a GPU"),
        memory_limit=prediction.memory_limit / 2**30,
        kernels=kernels(prediction, on, proposal.constants),
        peak_flops=machine_of(on, proposal.gpus).peak(prediction.mapping.precision),
        memory_bandwidth=on.gpu.memory_bandwidth,
        gpu=on.gpu.name,
    )

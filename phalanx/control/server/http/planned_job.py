"""A submission's plan: what the planner says of it on this fleet, as the core reckons with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec import Struct, structs

from phalanx.cluster.core import Core
from phalanx.cluster.jobs.job import (
    LONGEST_NS,
    ClusterJob,
    Expected,
    FallbackMapping,
    GangShape,
    JobSpec,
    Placement,
)
from phalanx.cluster.placement.catalogued import CPU, likely_nodes, planned_cluster
from phalanx.cluster.plan_record import Origin, PlanInterval, PlanRecord
from phalanx.cluster.policy import PricePolicy
from phalanx.cluster.units import HOUR_NS, SECOND_NS
from phalanx.config import ConfigError, Job, micro_batches, takes_unequal_shares, to_toml
from phalanx.control.wire.api_types import CostEstimate
from phalanx.control.wire.payload import TrainingWork, decode_payload, encode_payload
from phalanx.hardware import Cluster
from phalanx.plan import AxisTraffic, Constants, FailureSettings, Plan, Range, plan_job
from phalanx.plan.cost.failures import AUTOMATIC_RATE, rate_named
from phalanx.plan.cost.uncertainty import COMMUNICATION
from phalanx.plan.question.request import load_constants
from phalanx.plan.search.fewer_nodes import on_fewer_nodes
from phalanx.plan.search.open_axes import with_open_axes_chosen
from phalanx.plan.search.proposal import describe

# In the server's state: what `phalanx plan calibrate --out` wrote, for GPUs and for CPU cores.
CONSTANTS, CPU_CONSTANTS = "constants.toml", "constants-cpu.toml"
MOST_FALLBACKS = 3  # mappings for fewer nodes that travel with a job
RECENT_JOBS = 64  # whose starts are looked at
MOST = 1 << 53


class PlanningSite(Struct, frozen=True, kw_only=True):
    """What a job is planned with: the devices that it would get, and what the site knows."""

    devices: Cluster | None = None
    problem: str = ""  # why there are none
    state: Path | None = None  # the server's folder, which may hold calibrated constants
    measured: dict[str, int] = {}  # fields of Expected, as jobs before took
    failure_rate: str = ""  # per 1000 node-days, as its nodes were seen to fail; "": as jobs say


def site_of(
    core: Core,
    spec: JobSpec,
    job: Job,
    state: Path | None = None,
    *,
    placement: Placement | None = None,
) -> PlanningSite:
    """The fleet as it is now, for a job, which may have nodes. Reads it between two events."""
    view = core.view
    try:
        cluster = planned_cluster(view.fleet, spec, _ranks(job), cpu=job.train.device == CPU)
    except ConfigError as error:
        return PlanningSite(problem=str(error))
    automatic = job.checkpoint.failure_rate == AUTOMATIC_RATE
    return PlanningSite(
        devices=_priced(cluster, view.policy.price),
        state=state,
        measured=recent_times(reversed(view.jobs.values())),
        failure_rate=_seen_rate(core, spec, placement) if automatic else "",
    )


def _seen_rate(core: Core, spec: JobSpec, held: Placement | None) -> str:
    """Of the nodes that a job has, or is likely to get; "": no gang ran yet."""
    nodes = held.nodes if held is not None else likely_nodes(core.view.fleet, spec)
    ran = any(each.gpu_seconds for each in core.failures(core.view.now_ns))
    return f"{core.failures_per_million_node_days(nodes) / 1000:.4g}" if ran and nodes else ""


def planned(spec: JobSpec, job: Job, site: PlanningSite) -> JobSpec:
    """The submission with all that can be expected of it; what cannot be planned says why."""
    if site.devices is None:
        return unplanned(spec, job, site.problem)
    try:
        constants = constants_for(site.state, cpu=site.devices.gpu.key == CPU)
        chosen: tuple[str, ...] = ()
        if job.parallel.choose:
            elastic = spec.gang.least_replicas > 0 or spec.gang.most_replicas > 0
            job, chosen = with_open_axes_chosen(
                job, site.devices, constants=constants, keep_data=elastic
            )
        rate = rate_named(site.failure_rate or job.checkpoint.failure_rate)
        plan = plan_job(
            job,
            site.devices,
            constants=constants,
            settings=FailureSettings(rate=rate),
            spare_gpus=spec.spares * spec.gang.slot_gpus,
        )
    except ConfigError as error:
        return unplanned(spec, job, str(error))
    expected, origins = _expected(plan, job, site.measured)
    record = structs.replace(record_of(plan, origins), chosen=chosen)
    spec = _with_axes(spec, job) if chosen else spec
    gang = structs.replace(spec.gang, traffic=_whole_bytes(plan.traffic))
    spec = structs.replace(spec, gang=gang, expected=expected, plan=record)
    return structs.replace(spec, fallbacks=_fallbacks(spec, job, site, constants))


def _fallbacks(
    spec: JobSpec, job: Job, site: PlanningSite, constants: Constants | None
) -> tuple[FallbackMapping, ...]:
    """What the job can go on as where nodes are missing, the most nodes first.

    None where every node holds whole replicas of an elastic job: it just goes on with fewer. Nor
    of a job that is to come to the same bits each time: another mapping adds up in another order,
    unless virtual replicas keep it.
    """
    shape, work, devices = spec.gang, decode_payload(spec.payload), site.devices
    assert isinstance(work, TrainingWork) and devices is not None
    elastic = shape.least_replicas > 0 and shape.slot_gpus % shape.replica_ranks == 0
    bound = job.train.deterministic and not job.train.virtual_replicas
    if elastic or bound or not shape.slot_gpus:
        return ()
    fallbacks: list[FallbackMapping] = []
    nodes = shape.slots(shape.replicas)
    rate = FailureSettings(rate=rate_named(site.failure_rate or job.checkpoint.failure_rate))
    ways = on_fewer_nodes(
        job,
        devices,
        nodes=nodes,
        node_gpus=shape.slot_gpus,
        constants=constants,
    )
    for other, fewer in ways:
        plan = plan_job(other, fewer, constants=constants, settings=rate)
        expected, origins = _expected(plan, other, site.measured)
        before = fallbacks[-1] if fallbacks else None
        if before and 2 * before.slots >= nodes and expected.step_ns >= before.expected.step_ns:
            continue  # more nodes, and no faster; fewer than half cannot keep all memory
        payload = structs.replace(work, toml=to_toml(other), world_size=fewer.gpus)
        gang = structs.replace(
            _gang_of(spec.gang, other),
            least_replicas=0,
            most_replicas=0,
            traffic=_whole_bytes(plan.traffic),
        )
        fallbacks.append(
            FallbackMapping(
                gang=gang,
                expected=expected,
                plan=record_of(plan, origins),
                payload=encode_payload(payload),
            )
        )
    return tuple(reversed(fallbacks[-MOST_FALLBACKS:]))


def _with_axes(spec: JobSpec, job: Job) -> JobSpec:
    """The submission with the axes of a job whose mapping was chosen, and that job to run."""
    work = decode_payload(spec.payload)
    assert isinstance(work, TrainingWork)
    payload = encode_payload(structs.replace(work, toml=to_toml(job)))
    return structs.replace(spec, gang=_gang_of(spec.gang, job), payload=payload)


def _gang_of(shape: GangShape, job: Job) -> GangShape:
    """The shape with the axes of a job."""
    axes = job.parallel
    return structs.replace(
        shape,
        replicas=axes.data,
        tensor=axes.tensor,
        context=axes.context,
        pipeline=axes.pipeline,
    )


def unplanned(spec: JobSpec, job: Job, problem: str) -> JobSpec:
    """The submission with what its job file says, and why nothing else is expected of it."""
    stated = _stated(job)
    record = PlanRecord(origins=dict.fromkeys(stated, "job"), problem=problem)
    return structs.replace(spec, expected=Expected(**stated), plan=record)


class JobCost(Struct, frozen=True, kw_only=True):
    """What a submission takes, all jobs of an array together."""

    hours: float  # of one
    gpu_hours: float
    dollars: float
    kwh: float
    by_limit: bool  # at most: by its time limit, since nothing was planned


def cost_of(price: PricePolicy, spec: JobSpec) -> JobCost | None:
    """As planned, else by the time limit of a job that has GPUs; None: nobody can say."""
    plan, count = spec.plan, spec.array.count if spec.array else 1
    gpus = spec.gang.gpus(spec.gang.replicas)
    if plan is not None and plan.run_seconds and plan.micro_dollars and plan.watt_hours:
        hours = plan.run_seconds.mid / 3600
        return JobCost(
            hours=hours,
            gpu_hours=count * gpus * hours,
            dollars=count * plan.micro_dollars.mid / 1e6,
            kwh=count * plan.watt_hours.mid / 1e3,
            by_limit=False,
        )
    if not spec.time_limit_ns or not gpus:
        return None
    hours = spec.time_limit_ns / HOUR_NS
    gpu_hours = count * gpus * hours
    return JobCost(
        hours=hours,
        gpu_hours=gpu_hours,
        dollars=gpu_hours * price.micro_dollars_per_gpu_hour / 1e6,
        kwh=gpu_hours * price.watts_per_gpu / 1e3,
        by_limit=True,
    )


def cost_estimate(price: PricePolicy, specs: Sequence[JobSpec]) -> CostEstimate | None:
    """What submissions take together; None: of one of them nobody can say."""
    costs = [cost_of(price, spec) for spec in specs]
    priced = [cost for cost in costs if cost is not None]
    if not priced or len(priced) < len(costs):
        return None
    return CostEstimate(
        gpu_hours=sum(cost.gpu_hours for cost in priced),
        dollars=sum(cost.dollars for cost in priced),
        by_limit=any(cost.by_limit for cost in priced),
    )


def costs_above(price: PricePolicy, specs: Sequence[JobSpec]) -> str:
    """Which of the policy's thresholds submissions are expected above, in words; "": none."""
    costs = [cost for spec in specs if (cost := cost_of(price, spec)) is not None]
    hours = max((cost.hours for cost in costs), default=0.0)
    dollars, kwh = sum(cost.dollars for cost in costs), sum(cost.kwh for cost in costs)
    above = [
        f"{value:,.0f} {unit}, above {key} = {most:,}"
        for value, unit, key, most in (
            (hours, "hours", "price.ask_above_hours", price.ask_above_hours),
            (dollars, "dollars", "price.ask_above_dollars", price.ask_above_dollars),
            (kwh, "kWh", "price.ask_above_kwh", price.ask_above_kwh),
        )
        if most and value > most
    ]
    if not above:
        return ""
    by_limit = any(cost.by_limit for cost in costs)
    may = "by its time limit it may take up to " if by_limit else "it is planned to take "
    return may + " and ".join(above) + " of the policy"


def recent_times(jobs: Iterable[ClusterJob]) -> dict[str, int]:
    """Starts of the newest jobs where they took longer than is usual: deadlines follow them."""
    slowest: dict[str, int] = {}
    for number, job in enumerate(jobs):
        if number >= RECENT_JOBS:
            break
        for name in ("start_ns", "standby_ns", "form_ns"):
            if name in job.measured:
                slowest[name] = max(slowest.get(name, 0), getattr(job.expected, name))
    return slowest


def record_of(plan: Plan, origins: dict[str, Origin]) -> PlanRecord:
    """A plan as it is kept with its job."""
    return PlanRecord(
        device=plan.gpu,
        mapping=describe(plan.mapping),
        step_ns=_interval(plan.step_seconds.times(SECOND_NS)),
        run_seconds=_interval(plan.days.times(86400)),
        micro_dollars=_interval(plan.dollars.times(1e6)),
        watt_hours=_interval(plan.megawatt_hours.times(1e6)),
        memory_bytes=int(plan.memory_bytes),
        memory_limit_bytes=int(plan.memory_limit),
        origins=origins,
    )


def _expected(plan: Plan, job: Job, measured: dict[str, int]) -> tuple[Expected, dict[str, Origin]]:
    step_ns = max(1, _ns(plan.step_seconds.mid))
    exposed_ns = min(step_ns, _ns(sum(plan.parts[name] for name in COMMUNICATION)))
    again = plan.restart
    values = {
        "step_ns": step_ns,
        "exposed_ns": exposed_ns,
        "bubble_ns": min(step_ns - exposed_ns, _ns(plan.parts["bubble"])),
        "snapshot_ns": _ns(plan.stall_seconds),
        "checkpoint_steps": max(1, round(plan.checkpoint_seconds / plan.step_seconds.mid)),
        "checkpoint_ns": _ns(plan.stall_seconds),
        "flush_ns": _ns(plan.flush_seconds),
        "checkpoint_bytes": int(plan.checkpoint_bytes),
        "start_ns": _ns(again.start),
        "standby_ns": _ns(again.standby),
        "rejoin_ns": _ns(again.rejoin),
        "form_ns": _ns(again.form),
        "restore_peer_ns": _ns(again.restore_peer),
        "restore_disk_ns": _ns(again.restore_disk),
        "restore_remote_ns": _ns(again.restore_remote),
    }
    origins: dict[str, Origin] = dict.fromkeys(values, "planned")
    for name, value_ns in measured.items():
        if value_ns > values[name]:
            values[name], origins[name] = value_ns, "measured"
    stated = _stated(job)
    if not _saves_by_interval(job):
        values.pop("checkpoint_steps")
    return Expected(**{**values, **stated}), {**origins, **dict.fromkeys(stated, "job")}


def _stated(job: Job) -> dict[str, int]:
    """Expectations that the job file itself gives."""
    stated = {
        "steps": job.train.steps,
        "snapshot_steps": job.checkpoint.memory_every or 1,
        "checkpoint_steps": job.checkpoint.every,
        # Elsewhere the others would wait for a slow one whatever its share.
        "micro_batches": micro_batches(job) if takes_unequal_shares(job) else 0,
    }
    if _saves_by_interval(job):
        del stated["checkpoint_steps"]
    return stated


def _saves_by_interval(job: Job) -> bool:
    return not job.checkpoint.every and job.checkpoint.interval == "auto"


def constants_for(state: Path | None, *, cpu: bool) -> Constants | None:
    """Constants that were calibrated at the site; None: the shipped ones are used."""
    path = state / (CPU_CONSTANTS if cpu else CONSTANTS) if state is not None else None
    return load_constants(path) if path is not None and path.exists() else None


def _ranks(job: Job) -> int:
    axes = job.parallel
    return axes.pipeline * axes.data * axes.context * axes.tensor


def _priced(on: Cluster, price: PricePolicy) -> Cluster:
    """A cluster with the site's own price and power, as its reports have them."""
    return structs.replace(
        on,
        price_per_gpu_hour=price.micro_dollars_per_gpu_hour / 1e6,
        node_watts=float(price.watts_per_gpu * on.gpus_per_node),
        power_load=1.0,
        pue=1.0,
    )


def _whole_bytes(axes: tuple[AxisTraffic, ...]) -> tuple[AxisTraffic, ...]:
    """The core decides on whole numbers."""
    return tuple(structs.replace(axis, sent_bytes=float(int(axis.sent_bytes))) for axis in axes)


def _ns(seconds: float) -> int:
    return int(min(seconds * SECOND_NS, LONGEST_NS))


def _interval(values: Range) -> PlanInterval:
    return PlanInterval(*(int(min(value, MOST)) for value in (values.low, values.mid, values.high)))

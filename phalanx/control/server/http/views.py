"""What the core knows, as the API shows it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from phalanx.cluster.core import Core
from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.forecast.why import WaitExplainer, explainer
from phalanx.cluster.gang.seen_failures import NODE_DAY_GPU_SECONDS, GroupFailures, SeenFailures
from phalanx.cluster.jobs.job import ClusterJob, JobSpec, JobState
from phalanx.cluster.jobs.measured import expected_now
from phalanx.cluster.node import NodeState
from phalanx.cluster.policy import Partition
from phalanx.cluster.protocol.commands import Command, job_of
from phalanx.cluster.protocol.events import (
    AnswerPipeline,
    CancelPipeline,
    Event,
    Submit,
    SubmitPipeline,
    SubmitWorkflow,
)
from phalanx.cluster.reasons import Reason, about
from phalanx.cluster.units import HOUR_NS
from phalanx.control.server.shell_memory import Notice
from phalanx.control.trust.secrets import shown_address, shown_body, shown_payload
from phalanx.control.wire.api_types import (
    AgeRateOut,
    ArrayOut,
    ChangeOut,
    CommandOut,
    EventOut,
    FailureRateOut,
    JobDetail,
    JobOut,
    LossOut,
    NodeOut,
    NoticeOut,
    PartitionOut,
    QuestionOut,
    QuotaOut,
    Waits,
    Why,
)

TENTH_Z = 1.2816  # a tenth of a normal distribution is above this

Sees = Callable[[str], bool]  # whether somebody may know of a team's jobs


def why_of(reason: Reason) -> Why:
    """A reason with its sentence."""
    return Why(code=reason.code, text=str(reason), facts=reason.facts)


def names_of(fleet: Fleet, nodes: Iterable[int]) -> tuple[str, ...]:
    """Names of nodes."""
    return tuple(fleet.nodes[node].name for node in nodes)


def usual_node_gpus(fleet: Fleet) -> int:
    """GPUs of a node of the largest group of like nodes; 0: there are none."""
    sizes = Counter(fleet.columns.gpus.tolist())
    return sizes.most_common(1)[0][0] if sizes else 0


def job_out(core: Core, job: ClusterJob, now_ns: int) -> JobOut:
    """One job; ``now_ns``: the last event, which the core knows, may be long ago."""
    spec, placement, fleet = job.spec, job.placement, core.view.fleet
    replicas = placement.replicas if placement else job.wanted_replicas
    running_ns = max(core.view.now_ns, now_ns) - job.started_ns if placement else 0
    printed = job.printed
    return JobOut(
        id=job.id,
        name=spec.name,
        user=spec.user,
        team=spec.team,
        state=job.state,
        why=why_of(job.why),
        gpus=spec.gang.gpus(replicas),
        replicas=replicas,
        priority=spec.priority,
        qos=spec.qos,
        preemptible=spec.preemptible,
        step=job.step or (printed.step if printed else 0),
        steps=spec.expected.steps or (printed.steps if printed else 0),
        committed=job.committed,
        durable=job.durable,
        generation=job.generation,
        phase=job.gang.phase if job.gang else "",
        step_seconds=(job.step_ns or job.printed_step_ns) / 1e9,
        printed=printed is not None and not job.step,
        project=spec.project,
        array=_array_out(job),
        held=job.held,
        submitted_ns=job.submitted_ns,
        started_ns=job.started_ns,
        ended_ns=job.ended_ns,
        ran_seconds=(job.ran_ns + running_ns) / 1e9,
        retries_used=job.retries_used,
        preemptions=job.preemptions,
        nodes=names_of(fleet, placement.nodes) if placement else (),
        spares=names_of(fleet, placement.spares) if placement else (),
        micro_batches=job.gang.micro_batches if job.gang is not None else (),
    )


def _array_out(job: ClusterJob) -> ArrayOut | None:
    array = job.spec.array
    if array is None:
        return None
    return ArrayOut(
        job=job.array_parent,
        index=array.index(job.array_index),
        count=array.count,
        first_index=array.first,
        last_index=array.index(array.count - 1),
    )


def shown_spec(spec: JobSpec) -> JobSpec:
    """A submission as others than its node may see it."""
    fallbacks = tuple(msgspec.structs.replace(each, payload="") for each in spec.fallbacks)
    shown = msgspec.structs.replace(spec, payload=shown_payload(spec.payload), fallbacks=fallbacks)
    return msgspec.structs.replace(shown, webhook=shown_address(spec.webhook))


def job_detail(core: Core, job: ClusterJob, now_ns: int) -> JobDetail:
    """One job with its submission."""
    expected, origins = expected_now(job)
    used = core.ledger.used_gpu_ns(job.id) if job.id in core.ledger.accounts else 0
    return JobDetail(
        job=job_out(core, job, now_ns),
        spec=msgspec.Raw(msgspec.json.encode(shown_spec(job.spec))),
        evidence=job.evidence,
        used_gpu_hours=used / HOUR_NS,
        budget_gpu_hours=job.budget_gpu_seconds / 3600,
        forced=job.forced,
        lost_steps=job.lost_steps,
        losses=tuple(
            LossOut(first=each.first, last=each.last, at_ns=each.at_ns, why=why_of(each.why))
            for each in job.losses
        ),
        plan=job.spec.plan,
        expected=msgspec.structs.asdict(expected),
        origins=origins,
    )


def waits(
    core: Core,
    job: ClusterJob,
    history: list[Why],
    now_ns: int,
    answers: WaitExplainer | None = None,
) -> Waits:
    """Why a job is in its state; ``answers``: what was asked about others at the same moment."""
    pending, start_ns = None, None
    if job.state == JobState.PENDING:
        pending = (answers or explainer(core.queue, core.view)).of(job.id)
        start_ns = pending.estimated_start_ns
    start = f"unknown, because {pending.unknown}" if pending and pending.unknown else ""
    if start_ns is not None:
        start_ns = max(start_ns, now_ns)  # the core's own time is that of the last event
        start = f"in {about(start_ns - now_ns)}"
    return Waits(
        job=job.id,
        state=job.state,
        why=why_of(job.why),
        waits_for=why_of(pending.reason) if pending else None,
        estimated_start_ns=start_ns,
        start=start,
        priority=pending.priority if pending else {},
        history=history,
    )


def node_out(core: Core, node: int, connected: bool, skew_ns: int, sees: Sees) -> NodeOut:
    """One node; jobs of teams that the reader may not know of are left out."""
    fleet = core.view.fleet
    record, history = fleet.nodes[node], fleet.history.get(node)
    last = history[-1].reason if history else Reason("joined")
    jobs = [job for job in fleet.held[node] if sees(team_of(core, job))]
    return NodeOut(
        number=node,
        name=record.name,
        state=fleet.state(node).name.lower(),
        why=why_of(last),
        connected=connected,
        gpus=record.gpus,
        free_gpus=fleet.free_mask(node).bit_count(),
        cpus=record.cpus,
        kind=record.kind,
        partition=record.partition,
        leaf=record.leaf,
        pod=record.pod,
        rack=record.rack,
        memory_bytes=record.memory_bytes,
        features=record.features,
        domain=record.domain,
        rails=record.rails,
        power=record.power,
        switch=record.switch,
        jobs=tuple(jobs),
        clock_skew_seconds=skew_ns / 1e9,
        since_ns=fleet.since_ns(node),
    )


def node_history(core: Core, node: int) -> list[ChangeOut]:
    """What became of a node, newest last."""
    return [
        ChangeOut(
            time_ns=change.time_ns,
            state=NodeState(change.state).name.lower(),
            why=why_of(change.reason),
        )
        for change in core.view.fleet.history.get(node, ())
    ]


def event_out(event: Event, commands: Iterable[Command]) -> EventOut:
    """One entry of the log and what was done about it."""
    body: dict[str, Any] = shown_body(msgspec.to_builtins(event.body))
    kind = body.pop("kind")
    body.pop("request", None)  # it names the asker's token
    return EventOut(
        sequence=event.sequence,
        time_ns=event.time_ns,
        kind=kind,
        body=body,
        commands=[
            CommandOut(
                kind=type(command.body).__name__,
                nodes=len(command.target),
                why=why_of(command.body.reason),
            )
            for command in commands
        ],
    )


def visible(core: Core, event: Event, commands: Iterable[Command], sees: Sees) -> bool:
    """Whether an event says nothing about jobs of teams that the reader may not know of."""
    body = event.body
    if isinstance(body, Submit):
        return sees(body.spec.team)
    if isinstance(body, SubmitWorkflow):
        return all(sees(step.spec.team) for step in body.steps)
    if isinstance(body, SubmitPipeline):
        return sees(body.team)
    if isinstance(body, AnswerPipeline | CancelPipeline):
        run = core.view.pipelines.get(body.pipeline)
        return sees(run.team if run is not None else "?")
    jobs = dict.fromkeys(job_of(each) for each in (body, *(c.body for c in commands)))
    return all(sees(team_of(core, job)) for job in jobs if job)


def team_of(core: Core, job: int) -> str:
    """Whose job it is. One that ended long ago is forgotten: only those who see all see it."""
    known = core.view.jobs.get(job)
    return known.spec.team if known else "?"


def notice_out(core: Core, notice: Notice) -> NoticeOut:
    """Something a person wants to know."""
    return NoticeOut(
        sequence=notice.sequence,
        time_ns=notice.time_ns,
        level=notice.level,
        text=str(notice.reason),
        job=notice.job,
        node=core.view.fleet.nodes[notice.node].name if notice.node >= 0 else "",
    )


def questions(core: Core) -> list[QuestionOut]:
    """What a person must decide."""
    return [
        QuestionOut(
            question=each.number,
            about=each.about,
            nodes=names_of(core.view.fleet, each.nodes or tuple(core.withheld)),
            causes=each.causes or tuple(core.withheld.values()),
            asked_ns=each.asked_ns,
        )
        for each in core.questions.values()
    ]


def failures_by_kind(core: Core, now_ns: int) -> list[FailureRateOut]:
    """How often nodes fail, by kind, and as those do that are in the fleet."""
    nodes: dict[str, list[int]] = {}
    for number, node in enumerate(core.view.fleet.nodes):
        nodes.setdefault(node.kind, []).append(number)
    return [
        failure_rate(seen, core.failures_per_million_node_days(tuple(nodes.get(seen.kind, ()))))
        for seen in core.failures(now_ns)
    ]


def failure_rate(seen: SeenFailures, of_nodes: int) -> FailureRateOut:
    """A rate of failures, with the interval that holds four chances in five."""
    rate, low, high = _rate_between(seen.per_million_node_days, seen.failures)
    return FailureRateOut(
        kind=seen.kind,
        failures=seen.failures,
        node_days=seen.gpu_seconds / NODE_DAY_GPU_SECONDS,
        per_1000_node_days=rate,
        low=low,
        high=high,
        prior=seen.prior / 1000,
        causes=seen.causes,
        ages=[_group_rate(each) for each in (*seen.ages, *seen.failed_before)],
        nodes_per_1000=of_nodes / 1000,
    )


def _group_rate(seen: GroupFailures) -> AgeRateOut:
    rate, low, high = _rate_between(seen.per_million_node_days, seen.failures)
    return AgeRateOut(
        age=seen.group,
        failures=seen.failures,
        node_days=seen.gpu_seconds / NODE_DAY_GPU_SECONDS,
        per_1000_node_days=rate,
        low=low,
        high=high,
    )


def _rate_between(per_million: int, failures: int) -> tuple[float, float, float]:
    """A rate in a thousand days, and the bounds that it is between with four chances in five."""
    shape, rate = 1 + failures, per_million / 1000

    def quantile(z: float) -> float:
        """Of a gamma distribution, by the cube root that is nearly normal (Wilson and Hilferty)."""
        return rate * max(0.0, 1 - 1 / (9 * shape) + z / (3 * math.sqrt(shape))) ** 3

    return rate, quantile(-TENTH_Z), quantile(TENTH_Z)


def partitions(core: Core, sees: Sees) -> list[PartitionOut]:
    """Partitions of the fleet and of the policy, by name."""
    fleet, rules = core.view.fleet, core.view.policy.queue.partitions
    nodes: dict[str, list[int]] = {name: [] for name in rules}
    for number, node in enumerate(fleet.nodes):
        if fleet.state(number) is not NodeState.DEAD:
            nodes.setdefault(node.partition, []).append(number)
    alive = (job for job in core.view.jobs.values() if not job.ended and sees(job.spec.team))
    jobs = Counter((job.spec.partition, job.allocated) for job in alive)
    rows = []
    for name in sorted(nodes):
        rule = rules.get(name, Partition())
        usable = [node for node in nodes[name] if fleet.state(node) is NodeState.HEALTHY]
        rows.append(
            PartitionOut(
                name=name,
                nodes=len(nodes[name]),
                free_nodes=sum(not fleet.held[node] for node in usable),
                gpus=sum(fleet.nodes[node].gpus for node in nodes[name]),
                free_gpus=sum(fleet.free_mask(node).bit_count() for node in usable),
                priority=rule.priority,
                teams=rule.teams,
                most_seconds=rule.most_time_ns / 1e9,
                pending=jobs[name, False],
                running=jobs[name, True],
            )
        )
    return rows


def quotas(core: Core, sees: Sees) -> list[QuotaOut]:
    """What teams own and use."""
    used: Counter[str] = Counter()
    for number in core.view.active:
        job = core.view.jobs[number]
        replicas = job.placement.replicas if job.placement else 0
        used[job.spec.team] += job.spec.gang.gpus(replicas)
    teams = dict.fromkeys([*core.view.quotas, *used])
    rows = []
    for team in sorted(teams):
        if not sees(team):
            continue
        quota = core.view.quotas.get(team)
        rows.append(
            QuotaOut(
                team=team,
                gpus=quota.gpus if quota else 0,
                ceiling=quota.ceiling if quota else 0,
                weight=quota.weight if quota else 1,
                used_gpus=used[team],
            )
        )
    return rows

"""What the core does about each event: one function a fact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phalanx.cluster import pipeline_runs as pipelines
from phalanx.cluster import sense
from phalanx.cluster.context import Context
from phalanx.cluster.fleet import evacuation, renewal
from phalanx.cluster.fleet import node_events as nodes
from phalanx.cluster.gang import draining, fence, formation, losses, progress
from phalanx.cluster.gang.orders import outstanding
from phalanx.cluster.gang.phases import gang_of
from phalanx.cluster.jobs import budget, departure, elastic, replan, requests, submission
from phalanx.cluster.jobs import write_leases as storage
from phalanx.cluster.jobs.job import JobState
from phalanx.cluster.jobs.leave_cause import LeaveCause
from phalanx.cluster.placement.choose import defragment
from phalanx.cluster.protocol.commands import Proposal
from phalanx.cluster.protocol.events import (
    Answer,
    AnswerPipeline,
    Cancel,
    CancelPipeline,
    ControllerStarted,
    Corruption,
    DataStarved,
    Defragment,
    DrainNode,
    GangDrained,
    GangJoined,
    GangReady,
    GangStopped,
    GangStuck,
    Hold,
    JobFinished,
    LossSpike,
    NodeDescribed,
    NodeJoined,
    NodeRepaired,
    NodeSilent,
    NoProgress,
    Progress,
    QuarantineNode,
    RaiseBudget,
    ReadmitNode,
    Replan,
    Requeue,
    Scale,
    SetQuota,
    SetReservation,
    SlowRank,
    StorageSlow,
    Submit,
    SubmitPipeline,
    SubmitWorkflow,
    ThroughputRegression,
    Tick,
)
from phalanx.cluster.protocol.messages import (
    CheckResult,
    DeviceError,
    FlushWanted,
    KeeperSilent,
    NodeNotice,
    NodeSeen,
    ProgramEnded,
    RestoreFailed,
    StepsPrinted,
    WorkerExited,
)
from phalanx.cluster.queue import site_orders as orders
from phalanx.cluster.reasons import reason
from phalanx.cluster.recovery import agent_ends, incidents, own_failures


def _on_joined(ctx: Context, fact: GangJoined) -> None:
    if not agent_ends.judged(ctx, fact):
        formation.on_joined(ctx, fact)


def on_ready(ctx: Context, fact: GangReady) -> None:
    """A gang has restored: it runs, unless what ran before it may not have ended yet."""
    if formation.on_ready(ctx, fact):
        job = ctx.view.jobs[fact.job]
        ctx.queue.prepare(ctx.view)  # while nothing is lost by it: its next failure decides at once
        own_failures.restored(ctx, job)
        budget.watch(ctx, job)
        gang = gang_of(job)
        if gang.ending is not None:  # it only formed to save what it had in memory
            limit = departure.drain_limit_ns(ctx, job, gang.ending_why)
            draining.drain(ctx, job, limit, gang.ending, gang.ending_why)
        elif job.placement and (job.own or job.placement.replicas < job.wanted_replicas):
            ctx.look_at_queue(capacity=True)
        else:  # fewer may have been asked for while it formed
            wanted = job.wanted_replicas
            elastic.resize(ctx, job, wanted, reason("scale", replicas=wanted))
        # What could take its place, or stand by for it, may have come meanwhile.
        if evacuation.wants_to(ctx, job) or elastic.lacks_spares(job):
            ctx.look_at_queue(capacity=True)


def _on_program_ended(ctx: Context, fact: ProgramEnded) -> None:
    for ready in fence.confirmed(ctx, fact):
        on_ready(ctx, ready)


def _on_progress(ctx: Context, fact: Progress) -> None:
    known = ctx.view.jobs.get(fact.job)
    before = known.durable if known is not None else 0
    job = progress.on_progress(ctx, fact)
    if job is None:
        return
    own_failures.progressed(ctx, job)
    if job.durable > before:
        storage.written(ctx, job.id)


def _on_drained(ctx: Context, fact: GangDrained) -> None:
    job = draining.on_drained(ctx, fact)
    if job is not None:
        gang, placement = gang_of(job), job.placement
        assert gang.ending is not None and placement is not None
        # It starts again from memory at once; the checkpoint is for the case that this fails.
        again = LeaveCause.of(gang.ending_why) is LeaveCause.OWN_MAPPING
        departure.leave(ctx, job, gang.ending, gang.ending_why, keep_memory=again)
        replan.start_again(ctx, job, gang, placement)


def _on_finished(ctx: Context, fact: JobFinished) -> None:
    job = ctx.live(fact.job, fact.generation)
    if job is None:
        return
    # A program that has ended has ended, whatever steps it told of.
    if fact.step < job.committed and job.spec.reports_steps:
        rule = f"job {job.id} has committed step {job.committed}"
        ctx.notify(sense.nonsense(fact, "step", fact.step, rule), job=job.id, level="warning")
        return
    job.step, job.result = max(job.step, fact.step), fact.result
    gang = gang_of(job)
    if gang.only_saves and gang.ending is not None:  # before its agent was told to drain it
        departure.leave(ctx, job, gang.ending, gang.ending_why)
        return
    why = reason("finished" if job.spec.reports_steps else "program_ended")
    if fact.not_archived:
        why = reason("not_archived", what=fact.not_archived)
        ctx.notify(why, job=job.id, level="warning")
    departure.leave(ctx, job, JobState.DONE, why)


def _on_defragment(ctx: Context, fact: Defragment) -> None:
    moves = defragment(ctx.view, lambda job: ctx.queue.kept_from(ctx.view, job))
    why = reason("moves", count=len(moves))
    ctx.emit((), Proposal(reason=why, request=fact.request, moves=moves))


def take_over(ctx: Context, fact: ControllerStarted) -> None:
    """A new controller, before any timer fires: agents obey its epoch, jobs its policy.

    While none ran agents let their programs run on, so no fence ended in that time.
    """
    ctx.epoch = max(ctx.epoch, fact.epoch)
    if fact.policy is not None:
        ctx.view.policy = fact.policy
    fence.renew_all(ctx)


def _on_controller(ctx: Context, _: ControllerStarted) -> None:
    """What agents have not answered is said again."""
    for number in list(ctx.view.active):
        job = ctx.view.jobs[number]
        assert job.placement is not None
        for order in outstanding(ctx, job):
            ctx.emit(job.placement.nodes, order)


def _on_tick(ctx: Context, fact: Tick) -> None:
    """The timers that were due have fired already."""


# Facts about a node that is not in the fleet say nothing.
ABOUT_NODES = (
    NodeDescribed,
    NodeSilent,
    NodeSeen,
    NodeNotice,
    DeviceError,
    CheckResult,
    NodeRepaired,
    WorkerExited,
    RestoreFailed,
    SlowRank,
    StepsPrinted,
    ProgramEnded,
    KeeperSilent,
)

HANDLERS: dict[type, Callable[[Context, Any], None]] = {
    Submit: submission.submit,
    SubmitWorkflow: submission.submit_workflow,
    SubmitPipeline: pipelines.submit,
    AnswerPipeline: pipelines.answer,
    CancelPipeline: pipelines.cancel,
    Cancel: requests.cancel,
    Requeue: requests.requeue,
    Hold: requests.hold,
    Scale: elastic.on_scale,
    Replan: replan.on_replan,
    RaiseBudget: budget.on_raise,
    DrainNode: nodes.on_drain,
    ReadmitNode: nodes.on_readmit,
    QuarantineNode: nodes.on_quarantine,
    SetQuota: orders.on_quota,
    SetReservation: orders.on_reservation,
    Answer: nodes.on_answer,
    Defragment: _on_defragment,
    NodeJoined: nodes.on_joined,
    NodeDescribed: renewal.on_described,
    NodeSilent: nodes.on_silent,
    NodeSeen: nodes.on_seen,
    NodeNotice: nodes.on_notice,
    DeviceError: nodes.on_device_error,
    CheckResult: nodes.on_check_result,
    NodeRepaired: nodes.on_repaired,
    WorkerExited: incidents.on_worker_exited,
    GangJoined: _on_joined,
    GangStopped: losses.on_stopped,
    GangReady: on_ready,
    GangStuck: incidents.on_stuck,
    GangDrained: _on_drained,
    RestoreFailed: formation.on_restore_failed,
    Progress: _on_progress,
    StepsPrinted: progress.on_printed,
    ProgramEnded: _on_program_ended,
    JobFinished: _on_finished,
    NoProgress: incidents.on_no_progress,
    SlowRank: incidents.on_slow_rank,
    ThroughputRegression: incidents.on_regression,
    DataStarved: incidents.on_starved,
    LossSpike: incidents.on_loss_spike,
    Corruption: incidents.on_corruption,
    KeeperSilent: incidents.on_keeper_silent,
    FlushWanted: storage.on_wanted,
    StorageSlow: storage.on_slow,
    ControllerStarted: _on_controller,
    Tick: _on_tick,
}

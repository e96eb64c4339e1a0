"""Events about gangs that went wrong: exits, hangs, slow ranks, corruption, spikes, no answer."""

from __future__ import annotations

from phalanx.cluster.causes import Cause
from phalanx.cluster.context import Context
from phalanx.cluster.detectors import SlowPart, told_wrong
from phalanx.cluster.fleet import health
from phalanx.cluster.fleet.node_events import mark_node_lost
from phalanx.cluster.gang.draining import tell_bare
from phalanx.cluster.gang.orders import outstanding
from phalanx.cluster.gang.phases import enter, gang_of, timeouts_of
from phalanx.cluster.gang.remembered import Dispute
from phalanx.cluster.jobs.departure import drain_limit_ns, leave
from phalanx.cluster.jobs.job import ClusterJob, JobState
from phalanx.cluster.jobs.leave_cause import FOR_OTHERS, LeaveCause
from phalanx.cluster.protocol.commands import Level
from phalanx.cluster.protocol.events import (
    Corruption,
    DataStarved,
    GangStuck,
    LossSpike,
    NoProgress,
    SlowRank,
    ThroughputRegression,
)
from phalanx.cluster.protocol.messages import KeeperSilent, WorkerExited
from phalanx.cluster.reasons import Fact, Reason, reason
from phalanx.cluster.recovery.own_failures import EVIDENCE_KEPT, ReportedFailure, own_failure
from phalanx.cluster.recovery.recover import broken, give_up, slow, wait_for_answers
from phalanx.cluster.units import SECOND_NS

CLAIMS_KEPT = 1024  # about a disputed step
SLOW_CAUSES: dict[SlowPart, Cause] = {
    "compute": Cause.SLOW_COMPUTE,
    "communication": Cause.SLOW_NETWORK,
    "host": Cause.SLOW_HOST,
}
FOLLOW_A_LOSS = (Cause.USER_ERROR, Cause.SOFTWARE_BUG)  # how ranks of a program end by it
MORE_DRAINS = 2  # times that a gang with unsaved steps is given its deadline again


def on_worker_exited(ctx: Context, fact: WorkerExited) -> None:
    """A worker died; a peer that merely noticed says so."""
    job = ctx.live(fact.job, fact.generation)
    if job is None or job.placement is None:
        return
    if fact.node not in job.placement.nodes:
        return
    if gang_of(job).broken.get(fact.node, Cause.LOST_PEER) != Cause.LOST_PEER:
        return  # its node is dealt with already
    job.step = max(job.step, fact.step)
    doubted = _may_follow_from_a_loss(job, fact)
    if (doubted or fact.cause == Cause.LOST_PEER) and _withheld(ctx, job):
        return
    if doubted:
        wait_for_answers(ctx, job, fact)
        return
    failure = ReportedFailure(fact.cause, fact.detail, rank=fact.rank, step=fact.step)
    why = own_failure(ctx, job, failure)
    if why is not None:
        give_up(ctx, job, fact.node, fact.cause, why)
        return
    verdict = Cause.of(fact.cause).node
    if verdict != "keep":
        health.incident(ctx, fact.node, fact.cause)
        if not health.allowed(ctx, fact.node, fact.cause):
            verdict = "keep"
    broken(ctx, job, fact.node, fact.cause, lost=False)
    if verdict != "keep":
        health.suspect(ctx, fact.node, fact.cause)


def _may_follow_from_a_loss(job: ClusterJob, fact: WorkerExited) -> bool:
    """Whether a program's error may only say that another node is gone.

    Its ranks end by that, with an error like any other, before anybody misses the node.
    """
    gang, placement = gang_of(job), job.placement
    assert placement is not None
    if job.spec.reports_steps or fact.cause not in FOLLOW_A_LOSS or gang.ending is not None:
        return False
    open_yet = gang.phase == "settling" and gang.cause == Cause.LOST_PEER
    return len(dict.fromkeys(placement.nodes)) > 1 and (gang.phase == "running" or open_yet)


def _withheld(ctx: Context, job: ClusterJob) -> bool:
    """A gang that lost a peer confirms the silence of nodes that the breaker kept."""
    assert job.placement is not None
    if not ctx.health.withheld:
        return False
    silent = [node for node in job.placement.nodes if node in ctx.health.withheld]
    for node in silent:
        cause = ctx.health.withheld.pop(node)
        mark_node_lost(ctx, node, cause)
    return bool(silent)


def on_no_progress(ctx: Context, fact: NoProgress) -> None:
    """A gang hangs. The nodes that are behind are suspected; if nobody knows, all restart.

    A program without steps that shows no activity may only be waiting for something: it is
    restarted where somebody asked for that.
    """
    job = ctx.live(fact.job, fact.generation)
    if job is None or gang_of(job).phase not in ("running", "draining"):
        return
    assert job.placement is not None
    restart = fact.limit != "idle" or job.spec.timeouts.idle_ns or ctx.policy.timeouts.idle_restart
    if not restart:
        ctx.notify(reason("idle", evidence=_evidence(fact)), job=job.id, level="warning")
        return
    culprits = tuple(node for node in fact.nodes if node in job.placement.nodes)
    if _withheld(ctx, job):
        return
    shown = ctx.fleet.names(culprits) or "nobody is behind"
    code = "idle_hang" if fact.limit == "idle" else "hang"
    why = reason(code, step=fact.step, nodes=shown, evidence=_evidence(fact))
    told = str(why) + (f"; {fact.detail}" if fact.detail else "")
    ends = own_failure(ctx, job, ReportedFailure(Cause.HANG, told, alike=fact.limit))
    if ends is not None:
        give_up(ctx, job, (*culprits, job.placement.nodes[0])[0], Cause.HANG, ends)
        return
    ctx.notify(why, job=job.id, level="warning")
    for node in culprits:
        health.incident(ctx, node, Cause.HANG)
        permitted = health.trusted(ctx, Cause.HANG) and health.allowed(ctx, node, Cause.HANG)
        broken(ctx, job, node, Cause.HANG if permitted else Cause.NO_PROGRESS, lost=False)
        if permitted:
            health.suspect(ctx, node, Cause.HANG)
    if not culprits:
        broken(ctx, job, job.placement.nodes[0], Cause.NO_PROGRESS, lost=False)


def _evidence(fact: NoProgress) -> str:
    """The limit that was passed, the setting that it follows from, and what was measured."""
    if not fact.limit_ns:
        return ""
    quiet = f" for {_seconds(fact.quiet_ns)}"
    first = ", the first of this start," if fact.limit == "first_step" else ""
    if fact.limit == "phase":
        first = f", but {fact.phase},"
    sentence = f"{first}{quiet}; {_seconds(fact.limit_ns)} are allowed by {fact.setting}"
    if fact.cpu_ns < 0:
        return sentence
    gpu = f", GPUs at most {fact.gpu_ppm // 10_000} % busy" if fact.gpu_ppm >= 0 else ""
    done = f"{_seconds(fact.cpu_ns)} of CPU time, {fact.output_bytes} bytes of output"
    return f"{sentence}; its processes had {done}{gpu}"


def _seconds(span_ns: int) -> str:
    return f"{span_ns // SECOND_NS}.{span_ns % SECOND_NS // 100_000_000} s"


def on_stuck(ctx: Context, fact: GangStuck) -> None:
    """Some slots did not answer: ask once more, then do without them."""
    job = ctx.live(fact.job, fact.generation)
    if job is None or job.placement is None:
        return
    gang = gang_of(job)
    phases = {"join": "joining", "restore": "restoring", "drain": "draining"}
    if phases.get(fact.phase) == gang.phase:
        known = tuple(node for node in fact.nodes if node in job.placement.nodes)
        no_answer(ctx, job, known)


def no_answer(ctx: Context, job: ClusterJob, nodes: tuple[int, ...]) -> None:
    """The deadline of a phase has passed. ``nodes``: who is missing; (): nobody said."""
    gang, placement = gang_of(job), job.placement
    assert placement is not None
    if gang.phase == "draining":
        if _drains_on(ctx, job):
            return
        assert gang.ending is not None
        ending, why = gang.ending, gang.ending_why
        tell_bare(ctx, job)
        leave(ctx, job, ending, why, keep_memory=True)
        return
    if gang.attempts == 0:
        gang.unanswered = nodes
        limits = timeouts_of(ctx, job)
        gang.deadline_ns = enter(ctx, job, gang.phase, limits.abort_ns, attempts=1)
        for order in outstanding(ctx, job):
            ctx.emit(nodes or placement.nodes, order)
        return
    missing = nodes or gang.unanswered
    if not missing:
        why_failed = own_failure(
            ctx, job, ReportedFailure(Cause.NO_ANSWER, f"while it was {gang.phase}")
        )
        if why_failed is not None:
            give_up(ctx, job, placement.nodes[0], Cause.NO_ANSWER, why_failed)
            return
    shown = ctx.fleet.names(missing) or "nobody knows which of its nodes"
    ctx.notify(reason("stuck", nodes=shown), job=job.id, level="warning")
    for node in missing:
        health.incident(ctx, node, Cause.STUCK)
        if _stuck_before(ctx, node) or health.allowed(ctx, node, Cause.STUCK):
            broken(ctx, job, node, Cause.STUCK, lost=False)
            health.suspect(ctx, node, Cause.STUCK)
    if job.gang is not None and job.gang.phase != "settling":
        broken(ctx, job, placement.nodes[0], Cause.NO_ANSWER, lost=False)


def _stuck_before(ctx: Context, node: int) -> bool:
    """Whether gangs waited in vain for a node lately: then the breaker keeps it no longer."""
    since = ctx.now_ns - ctx.policy.health.breaker_window_ns
    known = ctx.health.incidents.get(node, ())
    return sum(at > since and cause == Cause.STUCK for at, cause in known) > 1


def _drains_on(ctx: Context, job: ClusterJob) -> bool:
    """Whether a gang that has not left in time is given more, since only its memory has some steps.

    Not where others were promised its nodes.
    """
    gang, placement = gang_of(job), job.placement
    assert placement is not None
    unsafe = job.step - job.durable if gang.ending != JobState.CANCELLED else 0
    if unsafe <= 0 or gang.attempts >= MORE_DRAINS or LeaveCause.of(gang.ending_why) in FOR_OTHERS:
        return False
    if 0 < gang.leave_by_ns <= ctx.now_ns:
        return False
    limit_ns = drain_limit_ns(ctx, job, gang.ending_why)
    due_ns = ctx.queue.promises.first_start_ns(placement.nodes)
    if due_ns is not None and due_ns < ctx.now_ns + limit_ns:
        return False
    gang.deadline_ns = enter(ctx, job, "draining", limit_ns, attempts=gang.attempts + 1)
    ctx.notify(reason("drain_on", steps=unsafe), job=job.id, level="warning")
    for order in outstanding(ctx, job):
        ctx.emit(placement.nodes, order)
    return True


def on_slow_rank(ctx: Context, fact: SlowRank) -> None:
    """A rank holds up the others: replaced, given less work, or borne, whichever is cheapest."""
    job = ctx.live(fact.job, fact.generation)
    if job is None or gang_of(job).phase != "running":
        return
    cause = SLOW_CAUSES[fact.part]
    if not health.trusted(ctx, cause):
        name = ctx.fleet.nodes[fact.node].name
        ctx.notify(reason("warned", detector=cause, node=name), job=job.id, level="warning")
        return
    slow(ctx, job, fact.node, cause, fact.slowdown_ppm, fact.step_ns)


def on_corruption(ctx: Context, fact: Corruption) -> None:
    """Numbers are wrong: the culprits leave, the job goes back behind the first wrong step."""
    job = ctx.live(fact.job, fact.generation)
    if job is None or gang_of(job).phase != "running":
        return
    assert job.placement is not None
    gang_of(job).rollback = fact.clean_step
    job.durables = [step for step in job.durables if step <= fact.clean_step]
    job.failed_step, job.failures_there = -1, 0  # what comes before it again is no failure twice
    job.failed_from = min(job.failed_from, fact.clean_step)
    culprits = tuple(node for node in fact.nodes if node in job.placement.nodes)
    if not culprits:
        dispute = _heard(job, fact)
        culprits = told_wrong(dispute.claims)
        if not culprits:
            _disputed(ctx, job, dispute, fact)
            return
    job.dispute = None
    told = reason("corrupt", step=fact.step, clean=fact.clean_step)
    ctx.notify(told, job=job.id, level="error")
    if not any(node in job.placement.nodes for node in culprits):
        # Who was wrong gave way before: the others make the step once more.
        broken(ctx, job, job.placement.nodes[0], Cause.DISPUTED, lost=False)
    for node in culprits:
        _accused(ctx, job, node)


def _accused(ctx: Context, job: ClusterJob, node: int) -> None:
    health.incident(ctx, node, Cause.SILENT_CORRUPTION)
    if job.placement is not None and node in job.placement.nodes:
        broken(ctx, job, node, Cause.SILENT_CORRUPTION, lost=False)
    health.suspect(ctx, node, Cause.SILENT_CORRUPTION)


def _heard(job: ClusterJob, fact: Corruption) -> Dispute:
    """What was ever said of this step, with what is said of it now."""
    assert job.placement is not None
    dispute, now = job.dispute, (fact.step, fact.block, job.placement.replicas)
    if dispute is None or (dispute.step, dispute.block, dispute.replicas) != now:
        dispute = Dispute(step=now[0], block=now[1], replicas=now[2])
    dispute.claims = (*dispute.claims[-CLAIMS_KEPT:], *fact.claims)
    dispute.times += 1
    job.dispute = dispute
    return dispute


def _disputed(ctx: Context, job: ClusterJob, dispute: Dispute, fact: Corruption) -> None:
    """Word stands against word. Made again, the step tells who was wrong, if it was by chance.

    Where the same step is disputed again, somebody is wrong every time: one of them gives way to
    a third, whose word decides, and is tested. After some attempts nobody here can help.
    """
    assert job.placement is not None
    suspects = dict.fromkeys(node for node, _ in fact.claims if node in job.placement.nodes)
    who = ctx.fleet.names(tuple(suspects)) or "nobody is suspected"
    ctx.notify(reason("corrupt_unknown", step=fact.step), job=job.id, level="error")
    if len({said for _, said in fact.claims}) == 1:  # they agree now, on what nobody said before
        job.dispute = None
        broken(ctx, job, job.placement.nodes[0], Cause.DISPUTED, lost=False)
    elif dispute.times >= ctx.policy.recovery.same_step_failures:
        words = f"ranks disagree at step {fact.step} ({who})"
        job.evidence = (*job.evidence[1 - EVIDENCE_KEPT :], words)
        why = reason("same_step", step=fact.step, times=dispute.times, evidence=words)
        leave(ctx, job, JobState.FAILED, why)
    elif suspects and dispute.times > 1:
        giving_way = max(reversed(suspects), key=lambda node: health.lemon_score(ctx, node))
        told = reason("third_opinion", node=ctx.fleet.nodes[giving_way].name, step=fact.step)
        ctx.notify(told, job=job.id, level="error")
        health.incident(ctx, giving_way, Cause.GAVE_WAY)
        broken(ctx, job, giving_way, Cause.GAVE_WAY, lost=False)
        health.suspect(ctx, giving_way, Cause.GAVE_WAY)
    else:
        broken(ctx, job, job.placement.nodes[0], Cause.DISPUTED, lost=False)


def on_loss_spike(ctx: Context, fact: LossSpike) -> None:
    """The loss jumped: said, and where the site wants it, undone."""
    job = ctx.live(fact.job, fact.generation)
    if job is None or gang_of(job).phase != "running" or job.placement is None:
        return
    back = ctx.policy.recovery.spike_rollback_steps
    if not back:
        ctx.notify(reason("spike", step=fact.step), job=job.id, level="warning")
        return
    ends = own_failure(
        ctx, job, ReportedFailure(Cause.NON_FINITE, "loss spike", step=fact.step, waits=False)
    )
    if ends is not None:
        give_up(ctx, job, job.placement.nodes[0], Cause.NON_FINITE, ends)
        return
    gang = gang_of(job)
    gang.rollback = max(0, fact.step - back)
    if ctx.policy.recovery.skip_batch:
        gang.skip_step = fact.step
    told = reason("spike_back", step=fact.step, clean=gang.rollback)
    ctx.notify(told, job=job.id, level="warning")
    broken(ctx, job, job.placement.nodes[0], Cause.NON_FINITE, lost=False)


def on_regression(ctx: Context, fact: ThroughputRegression) -> None:
    """Steps became slower for no rank's fault: said."""
    if ctx.live(fact.job, fact.generation) is not None:
        percent = fact.slowdown_ppm // 10_000
        ctx.notify(reason("regression", percent=percent), job=fact.job, level="warning")


def on_starved(ctx: Context, fact: DataStarved) -> None:
    """The GPUs wait for data: said."""
    if ctx.live(fact.job, fact.generation) is not None:
        percent = fact.share_ppm // 10_000
        ctx.notify(reason("starved", percent=percent), job=fact.job, level="warning")


def on_keeper_silent(ctx: Context, fact: KeeperSilent) -> None:
    """Snapshots cease, or are there again; what follows from a keeper's end its workers tell."""
    job = ctx.view.jobs.get(fact.job)
    if job is None or job.placement is None or fact.node not in job.placement.nodes:
        return
    node = ctx.view.fleet.names((fact.node,))
    facts: dict[str, Fact] = {"node": node, "seconds": fact.seconds, "step": job.committed}
    level: Level = "info" if fact.state == "answers" else "warning"
    ctx.notify(Reason(f"keeper_{fact.state}", facts), job=job.id, node=fact.node, level=level)

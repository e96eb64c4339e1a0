"""What happens to a gang when something breaks: gather what broke, choose the way out, take it."""

from __future__ import annotations

from msgspec import structs

from phalanx.cluster.causes import Cause
from phalanx.cluster.context import Context
from phalanx.cluster.fleet import health, spare_pool
from phalanx.cluster.gang import failure_rates
from phalanx.cluster.gang.losses import unsaved
from phalanx.cluster.gang.phases import gang_of, last_call_ns, timeouts_of, token
from phalanx.cluster.gang.way_taken import WayTaken
from phalanx.cluster.jobs import write_leases as storage
from phalanx.cluster.jobs.departure import depart_safely, leave
from phalanx.cluster.jobs.job import ClusterJob, JobState, SpecChange
from phalanx.cluster.jobs.leave_cause import STORAGE_GONE, LeaveCause
from phalanx.cluster.jobs.lifecycle import drop_spare
from phalanx.cluster.node import NodeState
from phalanx.cluster.protocol.commands import Abort, Rebalance
from phalanx.cluster.protocol.messages import WorkerExited
from phalanx.cluster.reasons import Reason, reason
from phalanx.cluster.recovery.incoming import safer
from phalanx.cluster.recovery.options import LEAVES, Option, Rung, degraded_ways, options, slow_ways
from phalanx.cluster.recovery.own_failures import (
    EVIDENCE_KEPT,
    ReportedFailure,
    back_off_ns,
    clear_if_sound,
    own_failure,
)
from phalanx.cluster.recovery.reshape import doubtful, remap, reshape, settle_nodes
from phalanx.cluster.units import SECOND_NS

MORE_SAVES = 1  # times that a gang which is to leave forms again to save what it has


def broken(ctx: Context, job: ClusterJob, node: int, cause: str, *, lost: bool) -> None:
    """Part of a gang no longer works. ``lost``: what the node kept in memory is gone too."""
    placement, gang = job.placement, job.gang
    if placement is None or gang is None:
        return  # another part of it was enough to make it leave
    if node in placement.spares:
        drop_spare(ctx, job, node)
        return
    known = gang.broken.get(node, Cause.LOST_PEER)
    if known == Cause.LOST_PEER:
        gang.broken[node] = cause
    if lost and (node in gang.keepers or node == gang.backup):
        gang.lost[node] = cause
    if gang.ending is not None:
        again = _saves_again(ctx, job)
        told = reason("saves_again" if again else "drain_broken", cause=cause)
        ctx.notify(told, job=job.id, level="warning")
        if not again:
            leave(ctx, job, gang.ending, gang.ending_why, keep_memory=True)
            return
    settle_ns = max(ctx.now_ns + ctx.policy.recovery.settle_ns, gang.retry_ns)
    if gang.phase == "settling":
        if gang.cause == Cause.LOST_PEER and cause != Cause.LOST_PEER:
            gang.cause, gang.culprit = cause, node
            ctx.ledger.found(job.id, cause)
            ctx.wake(settle_ns, "settle", job.id, token(job))
        return
    gang.cause, gang.culprit = cause, node
    ctx.ledger.fail(job.id, cause, "detection" if cause == Cause.LOST_PEER else "restart")
    storage.left(ctx, job.id)
    answer_ns = 0
    if cause == Cause.LOST_PEER:  # whoever does not answer the abort is the one that is missed
        answer_ns = settle_ns = ctx.now_ns + timeouts_of(ctx, job).abort_ns
    if gang.phase in ("running", "draining") or answer_ns:
        others = tuple([other for other in placement.nodes if other not in gang.broken])
        if answer_ns:  # a spare that died with them must not take their place
            others += placement.spares
        why = reason("abort", cause=cause, node=ctx.fleet.nodes[node].name)
        order = Abort(reason=why, job=job.id, generation=job.generation, answer_ns=answer_ns)
        ctx.emit(others, order)
    gang.interrupted = failure_rates.ends_running(ctx, gang)
    gang.phase, gang.since_ns = "settling", ctx.now_ns
    job.state = JobState.FORMING
    # Who is silent is said when answers are due; if nobody is, the gang goes on a little later.
    grace_ns = ctx.policy.timeouts.round_trip_ns if answer_ns else 0
    ctx.wake(settle_ns + grace_ns, "settle", job.id, token(job))


def wait_for_answers(ctx: Context, job: ClusterJob, fact: WorkerExited) -> None:
    """A program's error counts against its job only when all nodes have answered: see ``recover``.

    Until then it is as if a peer were lost.
    """
    gang = gang_of(job)
    if gang.unconfirmed is None:
        clear_if_sound(ctx, job, fact.cause)  # it still says since when the gang runs
        gang.unconfirmed = fact
    broken(ctx, job, fact.node, Cause.LOST_PEER, lost=False)


def _misses_nodes(ctx: Context, job: ClusterJob) -> bool:
    """Whether some of its nodes are silent that the breaker does not give up."""
    assert job.placement is not None
    return any(node in ctx.health.withheld for node in job.placement.nodes)


def _confirmed(ctx: Context, job: ClusterJob, fact: WorkerExited) -> None:
    """No node is missing: the error was the program's own."""
    failure = ReportedFailure(fact.cause, fact.detail, rank=fact.rank, step=fact.step)
    why = own_failure(ctx, job, failure)
    if why is not None:
        give_up(ctx, job, fact.node, fact.cause, why)
    else:
        broken(ctx, job, fact.node, fact.cause, lost=False)


def give_up(ctx: Context, job: ClusterJob, node: int, cause: str, why: Reason) -> None:
    """A job failed once too often: it ends, and what only memory holds is made durable first.

    For that it forms once more, makes no step, writes its state and leaves: see ``on_ready``.
    """
    gang = gang_of(job)
    if job.former is not None:
        _take_back(ctx, job, why)
        return
    if LeaveCause.of(why) in STORAGE_GONE or not unsaved(job):
        leave(ctx, job, JobState.FAILED, why)
        return
    broken(ctx, job, node, cause, lost=False)
    ctx.notify(reason("saves_first", why=str(why)), job=job.id, level="error")
    gang.ending, gang.ending_why = JobState.FAILED, why


def _take_back(ctx: Context, job: ClusterJob, why: Reason) -> None:
    """A changed job has made no step: it becomes what it was, and goes on from its checkpoint.

    One that cannot run as a fallback waits for its nodes, which keep what is in memory.
    """
    assert job.former is not None
    former, on_fewer = job.former, job.own is not None
    if on_fewer:
        former = job.own = structs.replace(former, fallbacks=())
    job.change, job.former = SpecChange(spec=former, taken_back=True), None
    job.stages_before = job.former_stages
    job.retries_used = job.failed_formations = job.failures_there = 0
    told = reason("change_taken_back", why=str(why))
    ctx.notify(told, job=job.id, level="error")
    leave(ctx, job, JobState.PENDING, told, keep_memory=on_fewer)


def _saves_again(ctx: Context, job: ClusterJob) -> bool:
    """Whether a gang that broke while it was to leave forms once more, to save what it has.

    Not for ever, and only where its nodes still hold the steps and there is time.
    """
    gang = gang_of(job)
    if not unsaved(job) or gang.ending == JobState.CANCELLED:
        return False
    if gang.phase == "settling":
        return True  # it is about to
    by_ns, saving_ns = gang.leave_by_ns, job.saving_ns + ctx.policy.recovery.settle_ns
    expected = job.expected
    if gang.phase == "draining":  # it has to form first
        saving_ns += expected.join_ns(cold=False) + expected.form_ns + expected.restore_peer_ns
    late = 0 < by_ns < ctx.now_ns + saving_ns
    if late or gang.saves >= MORE_SAVES:
        return False
    gang.saves += 1
    if by_ns:
        ctx.wake(by_ns, "leave_by", job.id, job.started_ns)
    return True


def recover(ctx: Context, job: ClusterJob) -> None:
    """Everything that broke together is known: takes the cheapest way out."""
    gang = gang_of(job)
    unconfirmed, gang.unconfirmed = gang.unconfirmed, None
    if gang.cause == Cause.LOST_PEER and unconfirmed is not None and not _misses_nodes(ctx, job):
        _confirmed(ctx, job, unconfirmed)
        return
    if gang.cause == Cause.LOST_PEER and not gang.retry_ns:
        _parted(ctx, job)
    if ctx.now_ns < gang.retry_ns:
        ctx.wake(gang.retry_ns, "settle", job.id, token(job))
        return
    ctx.ledger.found(job.id, gang.cause)
    if gang.interrupted is not None:
        failure_rates.interrupted(ctx, gang.interrupted, gang.cause, gang.culprit)
        gang.interrupted = None
        spare_pool.follow_rate(ctx)
    ways = options(ctx, job)
    if ways[0].rung in LEAVES and _merely_emptied(ctx, job):
        _leave_in_order(ctx, job)
        ways = options(ctx, job)
    if gang.ending is not None:  # it forms, wherever it can, only to save what it has in memory
        ways.sort(key=lambda way: way.rung is Rung.REQUEUE)
    best = ways[0]
    why = WayTaken.RECOVER.because(
        rung=best.rung,
        cause=gang.cause,
        node=ctx.fleet.nodes[gang.culprit].name if gang.culprit >= 0 else "",
        loss=best.loss_gpu_ns // 10**9,
        other=_others(ways),
    )
    if best.rung in LEAVES:
        job.preemptions += best.rung is Rung.REQUEUE
        gone = doubtful(ctx, job, tuple(gang.broken))
        ending, explanation = (
            (gang.ending, gang.ending_why) if gang.ending else (JobState.PENDING, why)
        )
        wait_ns = ctx.policy.recovery.wait_ns if best.rung is Rung.WAIT else 0
        leave(ctx, job, ending, explanation, keep_memory=True, keep_ns=wait_ns)
        if wait_ns and job.kept is not None and job.id in ctx.view.pending:
            rest = tuple(node for node in job.kept.holders if node not in best.leaving)
            ctx.queue.wait_for_rest(ctx.view, job, rest, ctx.now_ns + wait_ns)
        settle_nodes(ctx, gone)
        return
    for explanation in safer(ctx, job, best.leaving, best.incoming):
        ctx.notify(explanation, job=job.id)
    if best.fallback is not None:
        remap(ctx, job, best, why)
    else:
        reshape(ctx, job, best, why)


def _merely_emptied(ctx: Context, job: ClusterJob) -> bool:
    """Whether all that is wrong with a gang is that some of its nodes must be empty soon."""
    gang, fleet = gang_of(job), ctx.fleet
    if gang.ending is not None or not gang.broken or not unsaved(job):
        return False
    by_ns = _empty_by_ns(ctx, tuple(gang.broken))
    if 0 < by_ns < ctx.now_ns + job.saving_ns:
        return False
    return all(
        fleet.state(node) in (NodeState.DRAINING, NodeState.HEALTHY)
        and cause == ctx.health.drain_cause.get(node, Cause.HOST_MAINTENANCE)
        for node, cause in gang.broken.items()
    )


def _leave_in_order(ctx: Context, job: ClusterJob) -> None:
    """What was to take the place of its nodes is gone: a gang forms there again.

    It goes on until it must leave, or saves what it has if that is now.
    """
    gang = gang_of(job)
    nodes = tuple(gang.broken)
    by_ns = _empty_by_ns(ctx, nodes)
    last_ns = last_call_ns(ctx, job, by_ns)
    at_once = any(ctx.health.ordered.get(node) == 0 for node in nodes)
    if ctx.now_ns < last_ns and ctx.policy.recovery.in_place and not at_once:
        gang.broken = {}
        for node in nodes:
            ctx.wake(last_ns, "vacate", node, ctx.health.drain_deadline.get(node, 0))
        return
    job.preemptions += 1
    names = ", ".join(ctx.fleet.nodes[node].name for node in nodes[:EVIDENCE_KEPT])
    why = reason("node_leaves", node=names, what=Cause.of(gang.cause).what)
    depart_safely(ctx, job, JobState.PENDING, why, by_ns=by_ns)


def _empty_by_ns(ctx: Context, nodes: tuple[int, ...]) -> int:
    """When nodes that must be empty have to be; 0: as soon as that loses nothing."""
    drained = [ctx.health.drain_deadline[n] for n in nodes if n in ctx.health.drain_deadline]
    if not drained:  # a window opens
        return ctx.now_ns + ctx.policy.queue.grace_ns
    return min((by_ns for by_ns in drained if by_ns), default=0)


def _parted(ctx: Context, job: ClusterJob) -> None:
    """Ranks lost each other, and all their nodes live.

    The network between them may be whole again; if not, those who complained are replaced, and the
    others wait longer each time. It is no fault of the job, which is not given up for it.
    """
    gang, step_reached = gang_of(job), ctx.ledger.accounts[job.id].step
    job.partings = job.partings + 1 if step_reached <= job.parted_step else 1
    job.parted_step = step_reached
    names = ", ".join(ctx.fleet.nodes[node].name for node in list(gang.broken)[:EVIDENCE_KEPT])
    sentence = f"step {step_reached}: ranks on {names} lost a peer, and every node answers"
    job.evidence = (*job.evidence[1 - EVIDENCE_KEPT :], sentence)
    wait_ns = back_off_ns(ctx, job.partings - 1)
    if wait_ns:
        gang.retry_ns = ctx.now_ns + wait_ns
        seconds = wait_ns // SECOND_NS
        why = reason(
            "parted", step=step_reached, times=job.partings, seconds=seconds, evidence=sentence
        )
        ctx.notify(why, job=job.id, level="error")
        job.why = why
    if job.partings > 1:
        for node in list(gang.broken):
            health.incident(ctx, node, Cause.NETWORK_LINK)
            if health.allowed(ctx, node, Cause.NETWORK_LINK):
                gang.broken[node] = gang.cause = Cause.NETWORK_LINK
                gang.culprit = node
                health.suspect(ctx, node, Cause.NETWORK_LINK)


def slow(
    ctx: Context, job: ClusterJob, node: int, cause: str, slowdown_ppm: int, slow_step_ns: int
) -> None:
    """One node holds up a gang: the cheapest of bearing it, less work for it, a replacement."""
    assert job.placement is not None
    if node in job.placement.nodes:
        ways = slow_ways(ctx, job, node, cause, slowdown_ppm, slow_step_ns)
        _without_stopping(ctx, job, node, cause, ways)


def degrade(ctx: Context, job: ClusterJob, node: int, cause: str) -> None:
    """A node lost part of its network: run on slower, or replace it."""
    assert job.placement is not None
    if node not in job.placement.nodes:
        return
    ways = degraded_ways(ctx, job, node)
    if ways:
        _without_stopping(ctx, job, node, cause, ways)
    else:
        broken(ctx, job, node, cause, lost=False)


def _others(ways: list[Option]) -> str:
    """What else could have been done, and at what loss."""
    told = [f"{each.rung} with {each.loss_gpu_ns // 10**9}" for each in ways[1:3]]
    return " or ".join(told) or "none"


def _without_stopping(
    ctx: Context, job: ClusterJob, node: int, cause: str, ways: list[Option]
) -> None:
    best = ways[0]
    why = WayTaken.BEAR.because(
        rung=best.rung,
        cause=cause,
        node=ctx.fleet.nodes[node].name,
        loss=best.loss_gpu_ns // 10**9,
        other=_others(ways),
    )
    ctx.notify(why, job=job.id, node=node, level="warning")
    if best.rung is Rung.SWAP:
        health.incident(ctx, node, cause)
        if health.allowed(ctx, node, cause):
            broken(ctx, job, node, cause, lost=False)
            health.suspect(ctx, node, cause)
    elif best.rung is Rung.REBALANCE:
        gang, placement = gang_of(job), job.placement
        assert placement is not None
        gang.micro_batches = best.micro_batches
        order = Rebalance(
            reason=why,
            job=job.id,
            generation=job.generation,
            micro_batches=best.micro_batches,
        )
        ctx.emit(placement.nodes, order)

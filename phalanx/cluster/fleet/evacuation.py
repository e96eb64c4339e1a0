"""Nodes that must be empty by a time: for whom nothing can take their place, work goes on there.

A job leaves such a node as soon as another one can take over. Until then it makes steps, and when
just enough time is left it saves its state and goes, or goes on with fewer replicas.
"""

from __future__ import annotations

from phalanx.cluster.causes import Cause
from phalanx.cluster.context import Context
from phalanx.cluster.gang.phases import gang_of, last_call_ns
from phalanx.cluster.jobs.departure import depart_safely, give_way
from phalanx.cluster.jobs.job import ClusterJob, JobState
from phalanx.cluster.node import NodeState
from phalanx.cluster.reasons import Reason, reason
from phalanx.cluster.recovery.options import Rung, ways_without
from phalanx.cluster.recovery.recover import broken
from phalanx.cluster.units import SECOND_NS

OUT = (NodeState.DEAD, NodeState.QUARANTINED)


def vacate(ctx: Context, node: int, deadline_ns: int, why: Reason, cause: str) -> None:
    """Gives a node no new work, and moves what it runs elsewhere while there is time.

    ``deadline_ns``: when it must be empty; 0: now. Of several orders the soonest counts; one that
    said "now" is kept, and what leaves has until the deadline of the other.
    """
    state, health = ctx.fleet.state(node), ctx.health
    again = state is NodeState.DRAINING
    known_ns = health.drain_deadline.get(node, 0)
    if state in OUT or (again and (deadline_ns >= known_ns > 0 or deadline_ns == known_ns)):
        return
    at_once = again and not (known_ns and deadline_ns)
    if again:
        deadline_ns = deadline_ns if not known_ns else min(known_ns, deadline_ns or known_ns)
    else:
        owner = ctx.fleet.spare_for(node)
        if owner and state is NodeState.SPARE:
            broken(ctx, ctx.view.jobs[owner], node, cause, lost=False)
        health.testing.pop(node, None)
        ctx.fleet.set_state(node, NodeState.DRAINING, ctx.now_ns, why)
    health.drain_deadline[node], health.drain_cause[node] = deadline_ns, cause
    for number in list(ctx.fleet.held[node]):
        job = ctx.view.jobs[number]
        if _move_off(ctx, job, node, due=at_once) and not again:
            facts = {"node": ctx.fleet.nodes[node].name, "what": Cause.of(cause).what}
            left_s = (deadline_ns - last_call_ns(ctx, job, deadline_ns)) // SECOND_NS
            ctx.notify(reason("stays_on", seconds=left_s, **facts), job=job.id, node=node)
    ctx.look_at_queue(capacity=True)


def forget(ctx: Context, node: int, *, ordered: bool = True) -> None:
    """Nobody wants a node empty any more; not ``ordered``: but for a person who said so."""
    if ordered:
        ctx.health.ordered.pop(node, None)
    ctx.health.drain_deadline.pop(node, None)
    ctx.health.drain_cause.pop(node, None)


def _move_off(ctx: Context, job: ClusterJob, node: int, *, due: bool = False) -> bool:
    """A job leaves a node: for another that takes over what is in memory, or with a checkpoint.

    Where no other node is free it stays until it is ``due`` to leave. True: it does.
    """
    gang, deadline_ns = gang_of(job), ctx.health.drain_deadline[node]
    cause = ctx.health.drain_cause[node]
    if gang.ending is not None:
        depart_safely(ctx, job, gang.ending, gang.ending_why, by_ns=deadline_ns)
        return False
    best = ways_without(ctx, job, (node,), cause)[0].rung
    last_ns = last_call_ns(ctx, job, deadline_ns)
    if not due and ctx.now_ns < last_ns and best is not Rung.SWAP:
        ctx.wake(last_ns, "vacate", node, deadline_ns)
        return True
    no_time = 0 < deadline_ns < ctx.now_ns + job.saving_ns
    if no_time or best is not Rung.REQUEUE:
        broken(ctx, job, node, cause, lost=False)
        return False
    job.preemptions += 1
    why = reason("node_leaves", node=ctx.fleet.nodes[node].name, what=Cause.of(cause).what)
    depart_safely(ctx, job, JobState.PENDING, why, by_ns=deadline_ns)
    return False


def last_call(ctx: Context, node: int, deadline_ns: int) -> None:
    """Whoever is still on a node that must be empty soon leaves it, unless that was taken back."""
    if _waits(ctx, node) and ctx.health.drain_deadline[node] == deadline_ns:
        for number in list(ctx.fleet.held[node]):
            _move_off(ctx, ctx.view.jobs[number], node, due=True)


def _waits(ctx: Context, node: int) -> bool:
    """Whether a node is to be emptied by a time to come."""
    there = ctx.fleet.state(node) is NodeState.DRAINING
    return there and ctx.health.drain_deadline.get(node, 0) > ctx.now_ns


def move_on(ctx: Context) -> None:
    """Nodes became free, and the queue left them: who stays on one that must be empty moves there.

    Before the queue has looked, it could give the same nodes to others until the gang has stopped.
    """
    for node in [node for node in ctx.health.drain_deadline if _waits(ctx, node)]:
        cause = ctx.health.drain_cause[node]
        for number in list(ctx.fleet.held[node]):
            job = ctx.view.jobs[number]
            gang = gang_of(job)
            if gang.phase != "running" or gang.ending is not None:
                continue
            if ways_without(ctx, job, (node,), cause)[0].rung is Rung.SWAP:
                broken(ctx, job, node, cause, lost=False)


def wants_to(ctx: Context, job: ClusterJob) -> bool:
    """Whether a job that runs again stands on a node that must be empty later."""
    waiting = (node for node in ctx.health.drain_deadline if job.id in ctx.fleet.held[node])
    return any(_waits(ctx, node) for node in waiting)


def for_window(ctx: Context, job: ClusterJob, window: str, grace_ns: int, why: Reason) -> None:
    """A window is about to open on nodes of a job: it goes on elsewhere, or smaller, or leaves."""
    gang, placement = gang_of(job), job.placement
    assert placement is not None
    members = dict.fromkeys(ctx.queue.windows.members(ctx.view, window))
    nodes = tuple(node for node in placement.nodes if node in members)
    cause = Cause.HOST_MAINTENANCE
    if gang.phase == "settling" and all(gang.broken.get(node) == cause for node in nodes):
        return  # it moves already
    runs = gang.phase == "running" and gang.ending is None
    if runs and nodes and ways_without(ctx, job, nodes, cause)[0].rung is not Rung.REQUEUE:
        for node in nodes:
            broken(ctx, job, node, cause, lost=False)
        return
    give_way(ctx, job, grace_ns, why)

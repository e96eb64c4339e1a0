"""Checks of the fabric: when nodes are measured against each other, and what follows from it.

A node's own check does not see the network between nodes. So nodes that joined, came back or were
doubted are measured when they are idle, and those of a large gang before it starts there. A check
is a job of the core's own: it takes its nodes like any other, ends with its time limit, and a
controller that takes over finds it as it was. Its program leaves a verdict as its result. A node is
slow when several checks in a row say so, each of which has measured it several times.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from phalanx.cluster.causes import Cause
from phalanx.cluster.context import Context
from phalanx.cluster.fabric.before_gangs import LEAST_NODES
from phalanx.cluster.fabric.verdict import (
    FabricCheckWork,
    FabricVerdict,
    decode_verdict,
    encode_work,
)
from phalanx.cluster.fleet.evacuation import vacate
from phalanx.cluster.fleet.health import incident
from phalanx.cluster.jobs.departure import leave
from phalanx.cluster.jobs.job import ClusterJob, Expected, GangShape, JobSpec, JobState, Placement
from phalanx.cluster.jobs.lifecycle import end, start
from phalanx.cluster.jobs.submission import create
from phalanx.cluster.node import NodeState
from phalanx.cluster.placement.free_index import Nodes
from phalanx.cluster.reasons import Reason, reason
from phalanx.cluster.state import FabricCheck
from phalanx.cluster.units import HOUR_NS, MILLION, SECOND_NS

NAME = "fabric-check"  # of its jobs, and their team
PEERS = 8  # that a few nodes are measured with, where so many are idle
LONGEST_SETTLES = 12  # joins that do not end are measured after so many times ``settle_ns``
MOST_DOUBLED = 6  # times that the pause after a check without a result doubles


class _Wanted(NamedTuple):
    nodes: tuple[int, ...]
    limit_ns: int
    why: Reason
    for_job: int = 0


# When.


def look(ctx: Context) -> None:
    """Measures nodes that are due, when the wave of them has settled; the queue went first."""
    state, policy = ctx.view.fabric_checks, ctx.policy.fabric_checks
    for number in [each for each in state.waits if each not in ctx.view.pending]:
        del state.waits[number]
    if state.running is not None:
        return
    due = {node: since_ns for node, since_ns in state.due.items() if _is_idle(ctx, node)}
    if not due:
        return
    longest_ns = LONGEST_SETTLES * policy.settle_ns
    settled_ns = min(max(due.values()) + policy.settle_ns, min(due.values()) + longest_ns)
    at_ns = max(settled_ns, state.not_before_ns)
    if ctx.now_ns < at_ns:
        _wake(ctx, at_ns)
        return
    nodes = _with_peers(ctx, due)
    if nodes:
        came = tuple(node for node in nodes if node in due)
        why = reason("fabric_check", nodes=ctx.fleet.names(came), peers=len(nodes) - len(came))
        _start(ctx, _Wanted(nodes, policy.limit_ns, why))


def before_gang(ctx: Context, number: int, nodes: tuple[int, ...], until_ns: int) -> None:
    """Measures the nodes that a gang is about to get; another check that runs has to end first."""
    state = ctx.view.fabric_checks
    state.waits[number] = until_ns
    if state.running is None:
        why = reason("fabric_check_for", job=number)
        _start(ctx, _Wanted(nodes, until_ns - ctx.now_ns, why, number))


def woken(ctx: Context, _about: int, asked_ns: int) -> None:
    """Nodes may have settled, or the pause after a check is over."""
    state = ctx.view.fabric_checks
    if state.wake_ns == asked_ns:
        state.wake_ns = 0
        look(ctx)


def _wake(ctx: Context, at_ns: int) -> None:
    state = ctx.view.fabric_checks
    if not state.wake_ns or at_ns < state.wake_ns:
        state.wake_ns = at_ns
        ctx.wake(at_ns, "fabric", 0, at_ns)


def _is_idle(ctx: Context, node: int) -> bool:
    """Whether a node is well and has no work: also one that the fleet keeps as a spare."""
    state = ctx.fleet.state(node)
    pooled = state is NodeState.SPARE and not ctx.fleet.spare_for(node)
    return (pooled or state is NodeState.HEALTHY) and not ctx.fleet.held[node]


def _with_peers(ctx: Context, due: dict[int, int]) -> tuple[int, ...]:
    """Idle nodes of one kind: those that are due, then near others; of the first kind that has any.

    None that are promised to somebody.
    """
    closed = ctx.queue.closed_to(ctx.view, None)
    tried: dict[tuple[str, int], None] = {}
    for node in due:
        hardware = _kind(ctx, node)
        if hardware in tried or closed >> node & 1:
            continue
        tried[hardware] = None
        nodes = _of_kind(ctx, node, due, closed)
        if len(nodes) >= LEAST_NODES:
            return nodes
    return ()


def _kind(ctx: Context, node: int) -> tuple[str, int]:
    """Nodes that can be compared have the same."""
    return ctx.fleet.nodes[node].kind, ctx.fleet.nodes[node].gpus


def _of_kind(ctx: Context, first: int, due: dict[int, int], closed: Nodes) -> tuple[int, ...]:
    fleet, most = ctx.fleet, ctx.policy.fabric_checks.most_nodes
    columns, hardware, leaf = fleet.columns, _kind(ctx, first), fleet.nodes[first].leaf
    able = (columns.state == NodeState.HEALTHY) | (columns.state == NodeState.SPARE)
    alike = [
        node
        for node in np.flatnonzero(able & (columns.gpus == hardware[1])).tolist()
        if _kind(ctx, node) == hardware and _is_idle(ctx, node) and not closed >> node & 1
    ]
    new = [node for node in alike if node in due][:most]
    others = [node for node in alike if node not in due]
    spare = NodeState.SPARE
    others.sort(key=lambda n: (fleet.state(n) is spare, fleet.nodes[n].leaf != leaf, n))
    peers = min(max(PEERS, len(new)), most - len(new))
    return tuple(sorted(new + others[:peers]))


# The job.


def _start(ctx: Context, wanted: _Wanted) -> None:
    policy, nodes = ctx.policy.fabric_checks, [ctx.fleet.nodes[node] for node in wanted.nodes]
    gpus = nodes[0].gpus
    work = FabricCheckWork(
        ranks_per_node=max(1, gpus),
        slower_ppm=policy.slower_ppm,
        places={node.name: (node.leaf, node.pod) for node in nodes},
    )
    ranks = len(nodes) * max(1, gpus)
    spec = JobSpec(
        name=NAME,
        user=policy.user,
        team=NAME,
        gang=GangShape(replicas=ranks, slot_gpus=gpus, whole_nodes=True),
        expected=Expected(snapshot_steps=0),
        time_limit_ns=wanted.limit_ns + SECOND_NS,  # for forecasts: the check ends by itself before
        retries=0,
        reports_steps=False,
        payload=encode_work(work),
    )
    number = create(ctx, spec)
    job = ctx.view.jobs[number]
    for node in wanted.nodes:
        if ctx.fleet.state(node) is NodeState.SPARE:  # the pool is filled again when it has ended
            ctx.fleet.set_state(node, NodeState.HEALTHY, ctx.now_ns, wanted.why)
    masks = tuple((1 << gpus) - 1 for _ in nodes)
    placement = Placement(wanted.nodes, masks, replicas=ranks, reason=wanted.why)
    ctx.queue.start_at_once(ctx.view, job, placement)
    ctx.view.fabric_checks.running = FabricCheck(
        job=number, nodes=wanted.nodes, for_job=wanted.for_job
    )
    ctx.wake(ctx.now_ns + wanted.limit_ns, "fabric_limit", number)
    start(ctx, job, placement, wanted.why)


def time_over(ctx: Context, number: int, _token: int) -> None:
    """A check has had its time: its nodes are for others."""
    running = ctx.view.fabric_checks.running
    if running is not None and running.job == number:
        _stop(ctx, ctx.view.jobs[number], reason("fabric_check_limit"))


def _stop(ctx: Context, job: ClusterJob, why: Reason) -> None:
    if job.placement is not None:
        leave(ctx, job, JobState.CANCELLED, why)
    elif not job.ended:
        end(ctx, job, JobState.CANCELLED, why)


def follow(ctx: Context) -> None:
    """Hears what became of the check under way, after every event.

    One that lost a node or a process does not go on, as it measured what is no more; nor one on
    nodes that a broken gang may need.
    """
    state, check = ctx.view.fabric_checks, ctx.view.fabric_checks.running
    if check is None:
        return
    job = ctx.view.jobs.get(check.job)
    if job is not None and not job.ended:
        if job.generation > 1 or job.placement is None:
            _stop(ctx, job, reason("fabric_check_broken"))
        elif not check.for_job and _another_broke(ctx, job):
            _stop(ctx, job, reason("fabric_check_gives_way"))
    if job is None or job.ended:
        state.running = None
        _judge(ctx, check, job)


def _another_broke(ctx: Context, job: ClusterJob) -> bool:
    """Whether a gang is about to look for other nodes: it may need those that are measured."""
    gangs = (ctx.view.jobs[number].gang for number in ctx.view.active if number != job.id)
    return any(gang is not None and gang.phase == "settling" for gang in gangs)


# The verdict.


def _judge(ctx: Context, check: FabricCheck, job: ClusterJob | None) -> None:
    problem = "its record has expired" if job is None else str(job.why)
    if job is not None and job.state is JobState.DONE:
        try:
            verdict = decode_verdict(job.result)
        except msgspec.MsgspecError as error:
            problem = f"it left no verdict that can be read ({error})"
        else:
            problem = verdict.unclear
            if not problem:
                _use(ctx, check, verdict)
                return
    _not_measured(ctx, check, problem)


def _not_measured(ctx: Context, check: FabricCheck, problem: str) -> None:
    """Nobody waits for a check that cannot be made; it is tried again later, and later still."""
    state = ctx.view.fabric_checks
    pause_ns = ctx.policy.fabric_checks.pause_ns << min(state.failures, MOST_DOUBLED)
    state.failures += 1
    state.not_before_ns = ctx.now_ns + pause_ns
    _wake(ctx, state.not_before_ns)
    if check.for_job in state.waits:
        state.waits[check.for_job] = ctx.now_ns
    why = reason("fabric_not_checked", nodes=ctx.fleet.names(check.nodes), problem=problem)
    ctx.notify(why, job=check.job, level="warning")


def _use(ctx: Context, check: FabricCheck, verdict: FabricVerdict) -> None:
    state = ctx.view.fabric_checks
    state.failures = 0
    alone: dict[int, str] = {}  # nodes that alone are to blame
    members = dict.fromkeys(check.nodes)
    for finding in verdict.findings:
        node = ctx.fleet.index.get(finding.nodes[0], -1) if len(finding.nodes) == 1 else -1
        if node in members:
            alone.setdefault(node, finding.text)
        else:
            ctx.notify(reason("fabric_slow", what=finding.text), job=check.job, level="warning")
    for node in check.nodes:
        if node not in alone:
            state.measured_ns[node] = ctx.now_ns
            state.due.pop(node, None)
            state.slow.pop(node, None)
    for node, text in alone.items():
        _found_slow(ctx, check, node, text)
    if not alone:
        why = reason("fabric_well", nodes=len(check.nodes))
        ctx.notify(why, job=check.job)


def _found_slow(ctx: Context, check: FabricCheck, node: int, text: str) -> None:
    state, policy = ctx.view.fabric_checks, ctx.policy.fabric_checks
    times = state.slow.get(node, 0) + 1
    if times < policy.confirmations:
        state.slow[node] = times
        state.due[node] = 0  # at once, whatever else joins
        why = reason("fabric_slow_once", what=text, times=times, needed=policy.confirmations)
        ctx.notify(why, job=check.job, node=node)
        return
    state.slow.pop(node, None)
    state.due.pop(node, None)
    state.measured_ns[node] = ctx.now_ns
    incident(ctx, node, Cause.SLOW_NETWORK)
    state.drained_ns = [at for at in state.drained_ns if at > ctx.now_ns - HOUR_NS]
    most = max(1, len(ctx.fleet) * policy.most_drained_ppm // MILLION)
    why = reason("fabric_slow", what=text)
    if policy.drain and len(state.drained_ns) < most:
        state.drained_ns.append(ctx.now_ns)
        ctx.health.ordered[node] = 0  # until somebody gives it back
        vacate(ctx, node, 0, why, Cause.SLOW_NETWORK)
    elif policy.drain:
        why = reason("fabric_too_many", what=text, count=len(state.drained_ns))
    ctx.notify(why, job=check.job, node=node, level="warning")

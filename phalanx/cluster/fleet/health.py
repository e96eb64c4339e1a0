"""Nodes: suspicion, test, quarantine, re-admission, and the breaker that stops mass eviction.

A node is only ever evicted through ``allowed``: when too many would go within a short time, the
detectors are the likelier fault, and a person is asked.
"""

from __future__ import annotations

import numpy as np

from phalanx.cluster.causes import Cause
from phalanx.cluster.context import Context, Question
from phalanx.cluster.detectors import score
from phalanx.cluster.fleet import time_away
from phalanx.cluster.jobs.lifecycle import drop_spare
from phalanx.cluster.node import NodeState
from phalanx.cluster.protocol.commands import Ask, Check
from phalanx.cluster.reasons import Reason, reason
from phalanx.cluster.units import MILLION

INCIDENTS_KEPT = 64


def incident(ctx: Context, node: int, cause: str) -> None:
    """Remembers that something happened on a node."""
    known = ctx.health.incidents.setdefault(node, [])
    known.append((ctx.now_ns, cause))
    del known[:-INCIDENTS_KEPT]


def lemon_score(ctx: Context, node: int) -> int:
    """Thousandths of an incident: what the hardware of a node did, fading with time."""
    known = ctx.health.incidents.get(node, ())
    ages = [ctx.now_ns - at for at, cause in known if Cause.of(cause).domain == "hardware"]
    return score(ages, ctx.policy.health.lemon_half_life_ns)


def allowed(ctx: Context, node: int, cause: str) -> bool:
    """Whether a node may be evicted; when the breaker is open, a person is asked instead."""
    policy, state = ctx.policy.health, ctx.health
    if node in state.withheld:
        return False
    since = ctx.now_ns - policy.breaker_window_ns
    if state.evictions and state.evictions[0][0] <= since:
        state.evictions = [entry for entry in state.evictions if entry[0] > since]
    limit = max(policy.breaker_least_nodes, len(ctx.fleet) * policy.breaker_nodes_ppm // MILLION)
    if len(state.evictions) < limit:
        state.evictions.append((ctx.now_ns, node))
        return True
    state.withheld[node] = cause
    _want_answer(ctx)
    return False


def _want_answer(ctx: Context) -> None:
    """One question for a whole wave, asked when it has passed; again when there are more nodes."""
    wave_ns = ctx.policy.timeouts.heartbeat_ns
    number = next((q.number for q in ctx.questions.values() if q.about == "eviction"), None)
    if number is None:
        number = ctx.next_question
        ctx.next_question += 1
    elif ctx.now_ns <= ctx.questions[number].asked_ns + wave_ns:
        return  # it is part of the wave
    ctx.questions[number] = Question(
        number=number, about="eviction", nodes=(), causes=(), asked_ns=ctx.now_ns
    )
    ctx.wake(ctx.now_ns + wave_ns, "ask", number)


def heard(ctx: Context, node: int) -> None:
    """A node speaks, or is let in again: nobody need decide about it, nor answer for nobody."""
    if ctx.health.withheld.pop(node, None) is not None and not ctx.health.withheld:
        stale = [q.number for q in ctx.questions.values() if q.about == "eviction"]
        for number in stale:
            del ctx.questions[number]


def ask(ctx: Context, number: int) -> None:
    """Asks a person about the nodes that the breaker kept."""
    question = ctx.questions.get(number)
    if question is None or not ctx.health.withheld:
        ctx.questions.pop(number, None)
        return
    nodes = tuple(ctx.health.withheld)
    why = reason(
        "breaker",
        count=len(nodes) + len(ctx.health.evictions),
        minutes=ctx.policy.health.breaker_window_ns // (60 * 10**9),
        nodes=ctx.fleet.names(nodes),
    )
    ctx.emit((), Ask(reason=why, question=number, nodes=nodes))


def doubt(ctx: Context, node: int, why: Reason) -> None:
    """A node that could be given work no longer can; a job's spare stands by no more."""
    state = ctx.fleet.state(node)
    owner = ctx.fleet.spare_for(node)
    if state in (NodeState.HEALTHY, NodeState.SPARE):
        ctx.fleet.set_state(node, NodeState.SUSPECT, ctx.now_ns, why)
        ctx.look_at_queue()  # it may have been promised to somebody
        if owner:
            drop_spare(ctx, ctx.view.jobs[owner], node)


def suspect(ctx: Context, node: int, cause: str) -> None:
    """A node gets no new work and is tested; what it runs goes on."""
    doubt(ctx, node, reason("suspected", cause=cause, what=Cause.of(cause).what))
    if not ctx.fleet.held[node]:
        examine(ctx, node)


def doubted(ctx: Context, node: int) -> bool:
    """Whether a node that was drained has to be tested: it was, or became, suspect meanwhile."""
    changes = ctx.fleet.history.get(node, [])
    before = changes[-2].state if len(changes) > 1 else NodeState.HEALTHY
    since_ns = ctx.fleet.since_ns(node)
    known = ctx.health.incidents.get(node, ())
    return before not in (NodeState.HEALTHY, NodeState.SPARE) or any(
        at >= since_ns and Cause.of(cause).node != "keep" for at, cause in known
    )


def examine_idle(ctx: Context) -> None:
    """Nodes that were suspected while they ran on may be empty by now: their turn to be tested."""
    for node in np.flatnonzero(ctx.fleet.columns.state == NodeState.SUSPECT).tolist():
        waits = node in ctx.health.testing or node in ctx.health.withheld
        if not waits and not ctx.fleet.held[node]:
            examine(ctx, node)


def examine(ctx: Context, node: int) -> None:
    """Decides about a node that holds no work: a test, or quarantine without one."""
    state = ctx.fleet.state(node)
    if state in (NodeState.DEAD, NodeState.QUARANTINED, NodeState.DRAINING):
        return
    why = verdict_without_test(ctx, node)
    if why is not None:
        quarantine(ctx, node, why)
        return
    known = ctx.health.incidents.get(node, [])
    if known and known[-1][1] in ctx.policy.health.doubtful:
        quarantine(ctx, node, reason("doubtful", cause=known[-1][1]))
    if node not in ctx.health.testing:
        test(ctx, node)


def verdict_without_test(ctx: Context, node: int) -> Reason | None:
    """Why a node is quarantined whatever a test would say; None: a test decides."""
    policy, incidents = ctx.policy.health, ctx.health.incidents.get(node, [])
    if ctx.health.doomed.pop(node, None) is not None:
        return reason("quarantined_by")
    if incidents and incidents[-1][1] in policy.harmful:
        return reason("harmful", cause=incidents[-1][1])
    recent = [1 for time_ns, _ in incidents if time_ns > ctx.now_ns - policy.strike_window_ns]
    if len(recent) > policy.strikes:
        return reason("strikes", times=len(recent))
    score = lemon_score(ctx, node)
    return reason("lemon", score=score) if score > policy.lemon_score else None


def test(ctx: Context, node: int) -> None:
    """Asks a node for a full check; it has to answer in time."""
    why = reason("test_before")
    doubt(ctx, node, why)
    if ctx.fleet.held[node]:
        return  # it is being emptied, and examined then
    ctx.emit((node,), Check(reason=why, check="full", node=node))
    ctx.health.testing[node] = ctx.sequence
    ctx.wake(ctx.now_ns + ctx.policy.health.test_ns, "test", node, ctx.sequence)


def tested(ctx: Context, node: int, *, passed: bool, detail: str) -> None:
    """The result of a test: back to work, or quarantine."""
    ctx.health.testing.pop(node, None)
    if not passed:
        quarantine(ctx, node, reason("failed_test", detail=detail))
        return
    known = ctx.health.incidents.get(node, [])
    if known and known[-1][1] in DETECTORS:
        ctx.health.alarms.setdefault(known[-1][1], []).append(ctx.now_ns)
    readmit(ctx, node, reason("tested"))


def readmit(ctx: Context, node: int, why: Reason) -> None:
    """A node may work again, unless a person wants it empty."""
    heard(ctx, node)
    time_away.came_back(ctx, node)
    ctx.health.testing.pop(node, None)
    ctx.fleet.set_rails_down(node, 0)
    ctx.fleet.set_state(node, NodeState.HEALTHY, ctx.now_ns, why)
    came(ctx, node)
    if node in ctx.health.ordered:
        ctx.fleet.set_state(node, NodeState.DRAINING, ctx.now_ns, reason("drain_ordered"))
        ctx.health.drain_deadline[node] = ctx.health.ordered[node]
        ctx.health.drain_cause[node] = Cause.HOST_MAINTENANCE
    ctx.look_at_queue(capacity=True)


def came(ctx: Context, node: int) -> None:
    """A node begins to work, or works again: how fast its network is nobody knows."""
    checks = ctx.view.fabric_checks
    checks.measured_ns.pop(node, None)
    checks.slow.pop(node, None)
    if ctx.policy.fabric_checks.at_join:
        checks.due[node] = ctx.now_ns


def quarantine(ctx: Context, node: int, why: Reason) -> None:
    """A node without work is kept away from it until it passes a test."""
    assert not ctx.fleet.held[node], "a node is emptied before it is quarantined"
    ctx.health.testing.pop(node, None)
    ctx.fleet.set_state(node, NodeState.QUARANTINED, ctx.now_ns, why)
    ctx.look_at_queue()
    ctx.notify(why, node=node, level="warning")


# Causes that a detector guessed from timing; a test that finds nothing wrong refutes them.
DETECTORS = (
    Cause.SLOW_COMPUTE,
    Cause.SLOW_HOST,
    Cause.SLOW_NETWORK,
    Cause.HANG,
    Cause.SILENT_CORRUPTION,
)


def trusted(ctx: Context, detector: str) -> bool:
    """Whether a detector is within its budget of false alarms; beyond it, it only warns."""
    week = 7 * 24 * 3600 * 10**9
    alarms = [at for at in ctx.health.alarms.get(detector, []) if at > ctx.now_ns - week]
    if detector in ctx.health.alarms:
        ctx.health.alarms[detector] = alarms
    return len(alarms) <= ctx.policy.health.false_alarms_per_week

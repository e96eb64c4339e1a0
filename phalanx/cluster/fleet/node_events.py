"""Events about nodes: joined, silent, seen again, errors, checks, drains, repairs, answers."""

from __future__ import annotations

from phalanx.cluster.causes import Cause
from phalanx.cluster.context import Context
from phalanx.cluster.fleet import health
from phalanx.cluster.fleet.evacuation import OUT, forget, vacate
from phalanx.cluster.fleet.renewal import renew
from phalanx.cluster.gang import left_memory, risk_groups
from phalanx.cluster.gang.fence import fence_found, fence_lost
from phalanx.cluster.gang.orders import form_order, go_order, outstanding, stop_on
from phalanx.cluster.gang.phases import gang_of
from phalanx.cluster.jobs.job import ClusterJob
from phalanx.cluster.node import NodeState, bad_node
from phalanx.cluster.protocol.commands import Accept, Refuse, Stop
from phalanx.cluster.protocol.events import (
    Answer,
    DrainNode,
    NodeJoined,
    NodeRepaired,
    NodeSilent,
    QuarantineNode,
    ReadmitNode,
)
from phalanx.cluster.protocol.messages import (
    CheckResult,
    DeviceError,
    Holding,
    Inventory,
    NodeNotice,
    NodeSeen,
)
from phalanx.cluster.reasons import Reason, reason
from phalanx.cluster.recovery import agent_ends
from phalanx.cluster.recovery.recover import broken, degrade

# Causes after which nobody knows how a node is.
UNHEARD = (Cause.NODE_SILENT, Cause.CONNECTION_LOST)

FORGOTTEN_GENERATION = 2**31 - 1  # of a job that is no longer known: above all that it had


def evict(ctx: Context, node: int, cause: str, *, lost: bool) -> None:
    """Every job that has to do with a node goes on without it."""
    for number in list(ctx.fleet.held[node]):
        broken(ctx, ctx.view.jobs[number], node, cause, lost=lost)
    owner = ctx.fleet.spare_for(node)
    if owner and ctx.fleet.state(node) is NodeState.SPARE:
        broken(ctx, ctx.view.jobs[owner], node, cause, lost=lost)


def mark_node_lost(ctx: Context, node: int, cause: str) -> None:
    """A node is gone with all that it kept."""
    evict(ctx, node, cause, lost=True)
    why = reason("node_lost", cause=cause, what=Cause.of(cause).what)
    ctx.health.testing.pop(node, None)
    forget(ctx, node, ordered=False)
    ctx.fleet.set_state(node, NodeState.DEAD, ctx.now_ns, why)
    ctx.look_at_queue()


def on_silent(ctx: Context, fact: NodeSilent) -> None:
    """No sign of life: the node is dead, unless so many are that it cannot be true."""
    node, cause = fact.node, Cause.CONNECTION_LOST if fact.connection_lost else Cause.NODE_SILENT
    state = ctx.fleet.state(node)
    if state is NodeState.DEAD:
        return
    if not agent_ends.ended(ctx, node, fact.broke_ns):
        health.incident(ctx, node, cause)
    for number in ctx.fleet.held[node]:
        fence_lost(ctx, ctx.view.jobs[number], node, fact.heard_ns)
    if state is NodeState.QUARANTINED or health.allowed(ctx, node, cause):
        mark_node_lost(ctx, node, cause)
    elif state in (NodeState.HEALTHY, NodeState.SPARE) and not ctx.fleet.spare_for(node):
        why = reason("suspected", cause=cause, what=Cause.of(cause).what)
        ctx.fleet.set_state(node, NodeState.SUSPECT, ctx.now_ns, why)


def on_joined(ctx: Context, fact: NodeJoined) -> None:
    """An agent registered: a new node, or a known one that starts anew."""
    node = ctx.fleet.index.get(fact.node.name)
    if node is None:
        found = ctx.fleet.problem_of(fact.node)
        if found is not None:
            ctx.notify(reason("bad_node", problem=str(found)), level="warning")
            return
        node = ctx.fleet.add(fact.node, NodeState.DEAD)
        start = NodeState.HEALTHY if fact.healthy else NodeState.SUSPECT
        ctx.fleet.set_state(node, start, ctx.now_ns, reason("joined"))
        ctx.health.incarnation[node] = fact.inventory.incarnation
        risk_groups.begins(ctx, node)
        if fact.healthy:
            health.came(ctx, node)
        else:
            health.test(ctx, node)
        ctx.look_at_queue(capacity=True)
        return
    wrong = bad_node(fact.node)
    if wrong is not None:  # what is known of it stays
        ctx.notify(reason("bad_node", problem=str(wrong)), node=node, level="warning")
    elif fact.inventory.incarnation >= ctx.health.incarnation.get(node, 0):
        renew(ctx, node, fact.node)
    on_seen(ctx, NodeSeen(node=node, inventory=fact.inventory))


def on_seen(ctx: Context, fact: NodeSeen) -> None:
    """A node (re)connected: adopt what is right there, end what is not, miss what is missing."""
    node, inventory = fact.node, fact.inventory
    if inventory.incarnation < ctx.health.incarnation.get(node, 0):
        return  # a late echo of an agent that is gone
    before = ctx.health.incarnation.get(node, inventory.incarnation)
    ctx.health.incarnation[node] = inventory.incarnation
    state = ctx.fleet.state(node)
    if inventory.incarnation > before and state is not NodeState.DEAD:
        agent_ends.ended(ctx, node, ctx.now_ns)
    health.heard(ctx, node)
    reconcile(ctx, node, inventory)
    if state is NodeState.DEAD:
        # Whatever silenced it may do so again: it is tested before it gets work.
        ctx.fleet.set_state(node, NodeState.SUSPECT, ctx.now_ns, reason("seen"))
        if not ctx.fleet.held[node]:
            health.examine(ctx, node)
    elif state is NodeState.SUSPECT and node not in {**ctx.health.testing, **ctx.health.renewed}:
        health.readmit(ctx, node, reason("seen"))


def reconcile(ctx: Context, node: int, inventory: Inventory) -> None:
    """Compares what a node runs with what it should run."""
    reported = {holding.job: holding for holding in inventory.jobs}
    for number, holding in reported.items():
        job = ctx.view.jobs.get(number)
        wanted = job is not None and number in ctx.fleet.held[node]
        if job is None or not wanted or holding.generation > job.generation:
            end_there(ctx, node, holding, job)
        elif holding.generation == job.generation and gang_of(job).phase == "running":
            if holding.phase == "aborted":
                # Why it stopped nobody heard; it is said again, and counts instead of this.
                broken(ctx, job, node, Cause.LOST_PEER, lost=False)
            else:
                job.fenced.pop(node, None)
                ctx.emit((node,), go_order(job))  # it may have missed it
    owner = ctx.fleet.spare_for(node)
    for number, _ in inventory.snapshots:
        if number not in reported and number not in (*ctx.fleet.held[node], owner):
            _forget_there(ctx, node, number)
    if owner:
        _stand_by_again(ctx, node, ctx.view.jobs[owner])
    for number in list(ctx.fleet.held[node]):
        kept = any(job == number for job, _ in inventory.snapshots)
        missing(ctx, ctx.view.jobs[number], node, reported.get(number), kept=kept)


def _stand_by_again(ctx: Context, node: int, job: ClusterJob) -> None:
    """A new agent of a spare knows nothing of its job: it warms up, and may keep what it did."""
    if job.gang is not None and job.gang.phase in ("joining", "restoring", "running"):
        ctx.emit((node,), form_order(ctx, job))


def _forget_there(ctx: Context, node: int, number: int) -> None:
    """A node keeps snapshots of a job that it no longer runs: they go, unless they are needed."""
    job = ctx.view.jobs.get(number)
    if left_memory.holds(job, node):
        return
    gang = job.gang if job is not None else None
    if job is not None and gang is not None and gang.phase != "running" and node in gang.keepers:
        stop_on(ctx, job, (node,), keep_snapshots=True)
        return
    generation = job.generation if job is not None else FORGOTTEN_GENERATION
    ctx.emit((node,), Stop(reason=reason("stop"), job=number, generation=generation))


def end_there(ctx: Context, node: int, holding: Holding, job: ClusterJob | None) -> None:
    """A node runs what it should not. What it keeps in memory may be the only copy of a slot."""
    if job is not None and holding.phase in ("running", "aborted"):
        fence_found(ctx, job, node)
    gang = job.gang if job is not None else None
    needed = gang is not None and node in gang.keepers and gang.phase != "running"
    needed = needed or left_memory.holds(job, node)
    if job is not None and needed and holding.generation <= job.generation:
        stop_on(ctx, job, (node,), keep_snapshots=True)
        return
    generation = max(holding.generation, job.generation if job else 0)
    confirm = job is not None and node in job.fenced
    why = reason("stop")
    stop = Stop(reason=why, job=holding.job, generation=generation, confirm=confirm)
    ctx.emit((node,), stop)


def missing(
    ctx: Context, job: ClusterJob, node: int, holding: Holding | None, *, kept: bool
) -> None:
    """A node should run a job: the order is sent again, or its workers are counted as dead.

    ``kept``: its keeper still has snapshots of the job.
    """
    gang = gang_of(job)
    generation = holding.generation if holding else -1
    if gang.phase in ("joining", "restoring", "draining"):
        for order in outstanding(ctx, job):
            ctx.emit((node,), order)
    elif generation != job.generation and (gang.phase == "running" or gang.unconfirmed is not None):
        broken(ctx, job, node, Cause.AGENT_RESTARTED, lost=holding is None and not kept)


def on_device_error(ctx: Context, fact: DeviceError) -> None:
    """Something on a node reported an error."""
    node, cause = fact.node, Cause.of(fact.cause)
    if ctx.fleet.state(node) in OUT:
        return
    health.incident(ctx, node, fact.cause)
    if cause.effect == "goes_on":
        slower(ctx, node, fact)
    elif cause.domain == "user" or cause.node == "keep":
        job = ctx.view.jobs.get(fact.job)
        if job is not None and job.id in ctx.fleet.held[node]:
            broken(ctx, job, node, fact.cause, lost=False)
    elif health.allowed(ctx, node, fact.cause):
        evict(ctx, node, fact.cause, lost=False)
        health.suspect(ctx, node, fact.cause)
    else:
        _cannot_form(ctx, node, fact)


def _cannot_form(ctx: Context, node: int, fact: DeviceError) -> None:
    """The breaker keeps a node on which a job cannot start: that one need not wait for it."""
    job = ctx.view.jobs.get(fact.job)
    if job is None or job.id not in ctx.fleet.held[node]:
        return
    if gang_of(job).phase in ("joining", "restoring"):
        broken(ctx, job, node, fact.cause, lost=False)


def slower(ctx: Context, node: int, fact: DeviceError) -> None:
    """A node can go on, but not at its full speed."""
    if 0 <= fact.rail < ctx.fleet.nodes[node].rails:
        mask = ctx.fleet.rails_down(node) | 1 << fact.rail
        ctx.fleet.set_rails_down(node, mask)
    for number in list(ctx.fleet.held[node]):
        degrade(ctx, ctx.view.jobs[number], node, fact.cause)
    if Cause.of(fact.cause).node != "keep":
        health.suspect(ctx, node, fact.cause)


def on_check_result(ctx: Context, fact: CheckResult) -> None:
    """A check ended: one that the core asked for, or one the agent ran by itself."""
    node = fact.node
    if node in ctx.health.testing:
        if fact.command in (0, ctx.health.testing[node]):
            health.tested(ctx, node, passed=fact.passed, detail=fact.detail or fact.cause)
        return
    if fact.passed or ctx.fleet.state(node) in OUT:
        return
    cause = fact.cause or Cause.FAILED_CHECK
    health.incident(ctx, node, cause)
    if health.allowed(ctx, node, cause):
        evict(ctx, node, cause, lost=False)
        if ctx.fleet.held[node]:
            why = reason("failed_test", detail=fact.detail or cause)
            ctx.fleet.set_state(node, NodeState.SUSPECT, ctx.now_ns, why)
        else:
            health.quarantine(ctx, node, reason("failed_test", detail=fact.detail or cause))


def no_test(ctx: Context, node: int, command: int) -> None:
    """A check did not end in time."""
    if ctx.health.testing.get(node) == command and not ctx.fleet.held[node]:
        health.quarantine(ctx, node, reason("no_test"))


def on_repaired(ctx: Context, fact: NodeRepaired) -> None:
    """Somebody repaired a node: its past counts no more, and it is tested."""
    ctx.health.incidents.pop(fact.node, None)
    risk_groups.begins(ctx, fact.node)
    if ctx.fleet.state(fact.node) in (*OUT, NodeState.DRAINING):
        forget(ctx, fact.node)
        why = reason("repaired")
        ctx.fleet.set_state(fact.node, NodeState.SUSPECT, ctx.now_ns, why)
        health.test(ctx, fact.node)


def on_readmit(ctx: Context, fact: ReadmitNode) -> None:
    """A person gives a node back."""
    if not known(ctx, fact.node, fact.request):
        return
    state = ctx.fleet.state(fact.node)
    if state in (NodeState.HEALTHY, NodeState.SPARE):
        name = ctx.fleet.nodes[fact.node].name
        refuse(ctx, fact.request, reason("not_idle", node=name, state=state.name.lower()))
        return
    forget(ctx, fact.node)
    if fact.tested or (state is NodeState.DRAINING and not health.doubted(ctx, fact.node)):
        health.readmit(ctx, fact.node, reason("vouched"))
    else:
        ctx.fleet.set_state(fact.node, NodeState.SUSPECT, ctx.now_ns, reason("test_before"))
        health.test(ctx, fact.node)
    ctx.health.incidents.pop(fact.node, None)
    accept(ctx, fact.request)


def on_quarantine(ctx: Context, fact: QuarantineNode) -> None:
    """A person takes a node out."""
    if not known(ctx, fact.node, fact.request):
        return
    node = fact.node
    evict(ctx, node, Cause.HOST_MAINTENANCE, lost=False)
    if ctx.fleet.held[node]:
        ctx.health.doomed[node] = Cause.HOST_MAINTENANCE
        ctx.fleet.set_state(node, NodeState.SUSPECT, ctx.now_ns, reason("quarantined_by"))
    elif ctx.fleet.state(node) is not NodeState.DEAD:
        health.quarantine(ctx, node, reason("quarantined_by"))
    accept(ctx, fact.request)


def on_drain(ctx: Context, fact: DrainNode) -> None:
    """A person wants a node empty, until a person gives it back."""
    node, by_ns = fact.node, fact.deadline_ns
    if not known(ctx, node, fact.request):
        return
    ctx.health.ordered[node] = min(by_ns, ctx.health.ordered.get(node, by_ns))
    state = ctx.fleet.state(node)
    why = reason("drain_because", why=fact.why) if fact.why else reason("drain_ordered")
    vacate(ctx, node, by_ns, why, Cause.HOST_MAINTENANCE)
    later = reason("drain_later", state=state.name.lower())
    accept(ctx, fact.request, later if state in OUT else reason("accepted"))


def on_notice(ctx: Context, fact: NodeNotice) -> None:
    """The site takes a node away at a time."""
    why = reason("notice", cause=fact.cause)
    vacate(ctx, fact.node, fact.deadline_ns, why, fact.cause)


def on_answer(ctx: Context, fact: Answer) -> None:
    """A person decided about the nodes that the breaker kept."""
    question = ctx.questions.pop(fact.question, None)
    if question is None:
        refuse(ctx, str(fact.question), reason("no_such_question", question=fact.question))
        return
    withheld, ctx.health.withheld = ctx.health.withheld, {}
    ctx.health.evictions = []
    for node, cause in withheld.items():
        if fact.approve:
            mark_node_lost(ctx, node, cause)
        elif cause in UNHEARD:
            ctx.health.withheld[node] = (
                cause  # kept, but nothing new is given to it until it speaks
            )
        elif ctx.fleet.state(node) is NodeState.SUSPECT:
            health.readmit(ctx, node, reason("kept"))


def known(ctx: Context, node: int, request: str) -> bool:
    """Whether there is such a node; otherwise the request is refused."""
    if 0 <= node < len(ctx.fleet):
        return True
    refuse(ctx, request, reason("no_such_node", node=node))
    return False


def accept(ctx: Context, request: str, why: Reason | None = None) -> None:
    """Tells the asker that it is done."""
    ctx.emit((), Accept(reason=why or reason("accepted"), request=request))


def refuse(ctx: Context, request: str, why: Reason) -> None:
    """Tells the asker why it is not done."""
    ctx.emit((), Refuse(reason=why, request=request))

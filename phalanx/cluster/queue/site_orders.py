"""What people decide about the whole site: quotas of teams, reservations of nodes."""

from __future__ import annotations

from phalanx.cluster.context import Context
from phalanx.cluster.fleet import node_events as nodes
from phalanx.cluster.jobs.feasibility import quota_problems
from phalanx.cluster.policy import Quota
from phalanx.cluster.protocol.events import SetQuota, SetReservation
from phalanx.cluster.queue import windows
from phalanx.cluster.reasons import Reason, reason
from phalanx.cluster.state import Reservation


def on_quota(ctx: Context, fact: SetQuota) -> None:
    """Another quota for a team, or why not."""
    quota = Quota(gpus=fact.gpus, ceiling=fact.ceiling, weight=fact.weight)
    why = _bad("team", '""', "must not be empty") if not fact.team else None
    for found in quota_problems("quota", quota):
        why = why or _bad(found.key.removeprefix("quota."), found.value, found.rule)
    if why is not None:
        nodes.refuse(ctx, fact.request, why)
        return
    ctx.view.quotas[fact.team] = quota
    ctx.look_at_queue(capacity=True)
    nodes.accept(ctx, fact.request)


def on_reservation(ctx: Context, fact: SetReservation) -> None:
    """Another reservation, the end of one, or why not."""
    removed = fact.end_ns == 0
    wanted = Reservation(
        name=fact.name,
        start_ns=fact.start_ns,
        end_ns=fact.end_ns,
        nodes=tuple(dict.fromkeys(fact.nodes)),
        gpus=fact.gpus,
        teams=fact.teams,
    )
    if removed:
        why = _cannot_remove(ctx, fact)
    else:
        why = _cannot_reserve(ctx, fact) or _kept_by_others(ctx, wanted)
    if why is not None:
        nodes.refuse(ctx, fact.request, why)
        return
    over = [one.name for one in ctx.view.reservations.values() if one.end_ns <= ctx.now_ns]
    for name in (*over, fact.name):
        ctx.view.reservations.pop(name, None)
        ctx.queue.state.windows.pop(name, None)
        ctx.queue.state.short.pop(name, None)
    if not removed:
        ctx.view.reservations[fact.name] = wanted
        if wanted.gpus:
            ctx.queue.state.windows[fact.name] = ctx.queue.windows.choose(ctx.view, wanted)
    ctx.look_at_queue(capacity=True)
    nodes.accept(ctx, fact.request)


def _cannot_remove(ctx: Context, fact: SetReservation) -> Reason | None:
    if fact.name in ctx.view.reservations:
        return None
    return reason("no_such_reservation", name=fact.name)


def _cannot_reserve(ctx: Context, fact: SetReservation) -> Reason | None:
    """Why a reservation makes no sense; None: it does."""
    if not fact.name:
        return _bad("name", '""', "must not be empty")
    if "" in fact.teams:
        return _bad("teams", '""', "a team must have a name")
    if fact.end_ns <= fact.start_ns:
        rule = f"must be after start_ns = {fact.start_ns} (0 removes the reservation)"
        return _bad("end_ns", fact.end_ns, rule)
    if fact.end_ns <= ctx.now_ns:
        return _bad("end_ns", fact.end_ns, "must not be in the past")
    if fact.gpus < 0:
        return _bad("gpus", fact.gpus, "must not be negative")
    if fact.gpus > ctx.fleet.total_gpus:
        return _bad("gpus", fact.gpus, f"the fleet has {ctx.fleet.total_gpus}")
    if bool(fact.nodes) == bool(fact.gpus):
        given = f"{fact.gpus} beside {len(fact.nodes)} nodes"
        return _bad("gpus", given, "name the nodes, or how many GPUs: one of both")
    for node in fact.nodes:
        if not 0 <= node < len(ctx.fleet):
            return reason("no_such_node", node=node)
    return None


def _kept_by_others(ctx: Context, wanted: Reservation) -> Reason | None:
    """Which other reservation is in the way of one; None: they do not meet.

    Two that are for the same teams shut nobody out, and may share nodes by name.
    """
    if wanted.gpus:
        if ctx.queue.windows.choose(ctx.view, wanted):
            return None
        others = ", ".join(other.name for other in windows.beside(ctx.view, wanted))
        return reason("reserved_elsewhere", gpus=wanted.gpus, others=others)
    mine = dict.fromkeys(wanted.nodes)
    for other in windows.beside(ctx.view, wanted):
        both = [node for node in ctx.queue.windows.members(ctx.view, other.name) if node in mine]
        if both and sorted(other.teams) != sorted(wanted.teams):
            return reason("reserved_already", nodes=ctx.fleet.names(both), other=other.name)
    return None


def _bad(key: str, value: object, rule: str) -> Reason:
    return reason("bad_field", key=key, value=str(value), rule=rule)

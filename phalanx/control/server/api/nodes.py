"""Endpoints about nodes, quotas, reservations and what a person must decide."""

from __future__ import annotations

from functools import partial

import msgspec

from phalanx.cluster.node import NodeState
from phalanx.cluster.protocol.events import (
    Answer,
    Defragment,
    DrainNode,
    NodeRepaired,
    QuarantineNode,
    ReadmitNode,
    SetQuota,
    SetReservation,
)
from phalanx.control.server.http.endpoints import ADMIN, EVERYBODY, ApiError, Call, Endpoints
from phalanx.control.server.http.views import (
    failures_by_kind,
    names_of,
    node_history,
    node_out,
    partitions,
    questions,
    quotas,
)
from phalanx.control.wire import api_types as t
from phalanx.doctor.acceptance.certificate import SignedCertificate
from phalanx.doctor.acceptance.report import LOADS


def _out(call: Call, node: int) -> t.NodeOut:
    hub = call.leading.hub
    skew = hub.skew_ns.get(node, 0)
    return node_out(call.leading.core, node, node in hub.connections, skew, call.sees)


ENDPOINTS = Endpoints()
_node = partial(ENDPOINTS.add, roles=ADMIN, params=t.NodePath, audited=True)


@ENDPOINTS.add("GET /v1/nodes", EVERYBODY, query=t.NodesQuery)
async def list_nodes(call: Call) -> t.NodeList:
    """List nodes.

    In the order of their numbers.
    """
    fleet, query = call.leading.core.view.fleet, call.query
    listed: list[t.NodeOut] = []
    for node in range(query.after + 1, len(fleet)):
        if query.state not in ("all", fleet.state(node).name.lower()):
            continue
        if len(listed) == query.limit:
            return t.NodeList(nodes=listed, next_after=listed[-1].number)
        listed.append(_out(call, node))
    return t.NodeList(nodes=listed, next_after=-1)


@ENDPOINTS.add("GET /v1/nodes/{node}", EVERYBODY, params=t.NodePath)
async def show_node(call: Call) -> t.NodeDetail:
    """Show a node and its history."""
    node = call.node()
    return t.NodeDetail(
        node=_out(call, node),
        history=node_history(call.leading.core, node),
        description=call.leading.hub.descriptions.get(node),
    )


@ENDPOINTS.add("GET /v1/drift", EVERYBODY, query=t.DriftQuery)
async def show_drift(call: Call) -> t.DriftOut:
    """List nodes that differ from most of their kind in version, setting or speed."""
    fleet, only = call.leading.core.view.fleet, call.query.node
    if only:
        call.node_number(only)
    kinds = {
        node.name: node.kind
        for number, node in enumerate(fleet.nodes)
        if fleet.state(number) is not NodeState.DEAD
    }
    drift, described = await call.server.read(call.server.node_facts.drift, kinds)
    return t.DriftOut(
        differences=[each for each in drift.differences if only in ("", each.node)],
        undecided=drift.undecided,
        compared=drift.compared,
        silent=tuple(name for name in kinds if name not in described and only in ("", name)),
    )


async def _acceptance(call: Call) -> t.AcceptanceOut:
    acceptance, name = call.leading.hub.acceptances.of(call.node()), call.path.node
    data = await call.server.read(call.server.node_facts.certificate, name)
    return t.AcceptanceOut(
        node=name,
        ordered=acceptance is not None,
        ended=acceptance is not None and acceptance.ended,
        problem=acceptance.problem if acceptance is not None else "",
        lines=tuple(acceptance.lines) if acceptance is not None else (),
        certificate=msgspec.json.decode(data, type=SignedCertificate) if data else None,
    )


@ENDPOINTS.add("GET /v1/nodes/{node}/acceptance", EVERYBODY, params=t.NodePath)
async def show_acceptance(call: Call) -> t.AcceptanceOut:
    """Show the progress of a node's burn-in, and its newest certificate."""
    return await _acceptance(call)


@_node("POST /v1/nodes/{node}/acceptance", body=t.AcceptanceIn)
async def start_acceptance(call: Call) -> t.AcceptanceOut:
    """Burn a drained node in, and have it certify what it reached."""
    node, fleet, body = call.node(), call.leading.core.view.fleet, call.body
    name, acceptances = fleet.nodes[node].name, call.leading.hub.acceptances
    takes_work = fleet.state(node) not in (NodeState.DRAINING, NodeState.QUARANTINED)
    if takes_work or fleet.held[node]:
        text = f"{name} takes work, or still has some: drain it first (`phalanx drain {name}`)"
        raise ApiError(409, "not_drained", text)
    known = acceptances.of(node)
    if known is not None and not known.ended:
        raise ApiError(409, "already_runs", f"a burn-in runs on {name}")
    if acceptances.start(node, body.seconds, body.loads or LOADS, body.dcgm_level) is None:
        raise ApiError(409, "not_connected", f"the agent of {name} is not connected")
    return await _acceptance(call)


@_node("DELETE /v1/nodes/{node}/acceptance")
async def stop_acceptance(call: Call) -> t.AcceptanceOut:
    """End a burn-in early; what it measured is certified as incomplete."""
    if not call.leading.hub.acceptances.stop(call.node()):
        raise ApiError(409, "none_runs", f"no burn-in runs on {call.path.node}")
    return await _acceptance(call)


@ENDPOINTS.add("GET /v1/failure-rates", EVERYBODY)
async def failure_rates(call: Call) -> t.FailureRates:
    """Give this cluster's measured failure rates by cause."""
    now_ns = call.leading.controller.clock.now_ns()
    return t.FailureRates(rates=failures_by_kind(call.leading.core, now_ns))


@_node("POST /v1/nodes/{node}/drain", body=t.DrainIn)
async def drain_node(call: Call) -> t.Done:
    """Empty a node and give it no new work."""
    seconds = call.body.deadline_seconds
    deadline = call.leading.controller.clock.now_ns() + seconds * 10**9 if seconds else 0
    return await call.order(DrainNode(node=call.node(), deadline_ns=deadline, why=call.body.why))


@_node("POST /v1/nodes/{node}/readmit", body=t.Readmit)
async def readmit_node(call: Call) -> t.Done:
    """Give a node back to the fleet, after a test."""
    asked = call.body
    return await call.order(ReadmitNode(node=call.node(), tested=asked.tested, why=asked.why))


@_node("POST /v1/nodes/{node}/quarantine")
async def quarantine_node(call: Call) -> t.Done:
    """Take a node out of the fleet."""
    return await call.order(QuarantineNode(node=call.node()))


@_node("POST /v1/nodes/{node}/repaired")
async def repaired_node(call: Call) -> t.Done:
    """Say that a node was repaired.

    Its past counts no more.
    """
    return await call.order(NodeRepaired(node=call.node()))


@ENDPOINTS.add("GET /v1/partitions", EVERYBODY)
async def list_partitions(call: Call) -> t.PartitionList:
    """List partitions: nodes, rules, and the jobs that name them."""
    return t.PartitionList(partitions=partitions(call.leading.core, call.sees))


@ENDPOINTS.add("GET /v1/quotas", EVERYBODY)
async def list_quotas(call: Call) -> t.QuotaList:
    """List teams' GPU quotas and use."""
    return t.QuotaList(quotas=quotas(call.leading.core, call.sees))


@ENDPOINTS.add("PUT /v1/quotas/{team}", ADMIN, params=t.TeamPath, body=t.QuotaIn, audited=True)
async def set_quota(call: Call) -> t.Done:
    """Set a team's quota."""
    body = call.body
    order = SetQuota(team=call.path.team, gpus=body.gpus, ceiling=body.ceiling, weight=body.weight)
    return await call.order(order)


@ENDPOINTS.add("GET /v1/reservations", EVERYBODY)
async def list_reservations(call: Call) -> t.ReservationList:
    """List reservations."""
    view = call.leading.core.view
    listed = [
        t.ReservationOut(
            name=each.name,
            start_ns=each.start_ns,
            end_ns=each.end_ns,
            nodes=names_of(view.fleet, each.nodes),
            gpus=each.gpus,
            teams=each.teams,
        )
        for each in view.reservations.values()
    ]
    return t.ReservationList(reservations=listed)


@ENDPOINTS.add(
    "PUT /v1/reservations/{name}", ADMIN, params=t.NamePath, body=t.ReservationIn, audited=True
)
async def set_reservation(call: Call) -> t.Done:
    """Reserve nodes for teams or for maintenance."""
    body = call.body
    order = SetReservation(
        name=call.path.name,
        start_ns=body.start_ns,
        end_ns=body.end_ns,
        nodes=tuple(call.node_number(name) for name in body.nodes),
        gpus=body.gpus,
        teams=body.teams,
    )
    return await call.order(order)


@ENDPOINTS.add(
    "POST /v1/questions/{question}", ADMIN, params=t.QuestionPath, body=t.Decision, audited=True
)
async def answer_question(call: Call) -> t.Done:
    """Answer a question that needs a person's decision."""
    known = {each.question for each in questions(call.leading.core)}
    if call.path.question not in known:
        raise ApiError(404, "no_such_question", f"question {call.path.question} is not open")
    asked, by = call.body, call.token.name
    order = Answer(question=call.path.question, approve=asked.approve, by=by, why=asked.why)
    return await call.order(order)


@ENDPOINTS.add("POST /v1/defragment", ADMIN, audited=True)
async def defragment(call: Call) -> t.Moves:
    """Propose moves of jobs that would make room for large gangs.

    Nothing is moved.
    """
    outcome = await call.leading.controller.order(Defragment())
    fleet = call.leading.core.view.fleet
    return t.Moves(
        moves=[
            t.Move(job=job, source=fleet.nodes[source].name, target=fleet.nodes[target].name)
            for job, source, target in outcome.moves
        ]
    )
